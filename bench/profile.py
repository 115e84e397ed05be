"""Being written."""

from bench.steps import Options


def show(options: Options) -> None:
    raise NotImplementedError
