"""Being written."""

from pathlib import Path
from bench.figures import Results


def draw(results: Results, path: Path) -> None:
    return
