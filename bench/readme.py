"""Fills the table of bench/README.md from a run's JSON, between two markers."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from bench.figures import Results
from bench.show import cells, noise

BEGIN = "<!-- figures: written by `python -m bench --readme` -->"
END = "<!-- end of figures -->"


def rewrite(readme: Path, results: Results) -> None:
    """Replaces what stands between the markers; the rest of the file stays as it is."""
    before, found, rest = readme.read_text().partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise SystemExit(f"{readme} has no place for the figures: put {BEGIN!r} and {END!r} into it")
    readme.write_text(f"{before}{BEGIN}\n{_text(results)}\n{END}{after}")


def _text(results: Results) -> str:
    machine, versions = results.machine, results.versions
    lines = [
        f"Measured {results.date[:16].replace('T', ' ')} UTC by `python -m bench {' '.join(results.arguments)}`".rstrip(
            " `"
        )
        + "`:",
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB; {machine.kernel};",
        f"{machine.file_system}; " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ";",
        f"revision `{results.revision}`; {noise(results)}.",
    ]
    for scenario, figures in groupby(results.figures, key=lambda figure: figure.scenario):
        lines += [
            "",
            f"### {scenario}",
            "",
            "| case | best | median | unit | beside |",
            "| --- | --: | --: | --- | --- |",
        ]
        for one in figures:
            _, case, best, median, unit, said = cells(one)
            lines.append(f"| {case} | {best} | {median} | {unit} | {said} |")
    return "\n".join(lines)
