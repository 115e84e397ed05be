"""Being written."""

from pathlib import Path
from bench.figures import Results


def rewrite(readme: Path, results: Results) -> None:
    return
