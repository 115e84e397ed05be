"""What a run measures: figures, each with its samples and its ratios to baselines of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

Better = Literal["higher", "lower"]


class Figure(Struct, kw_only=True):
    """One number of one case, as often as it was measured. Machines are noisy: read best and median together."""

    scenario: str
    case: str
    unit: str
    better: Better
    samples: list[float]
    best: float
    median: float
    ratios: dict[str, float] = field(default_factory=dict)
    """By the baseline's short name: this one's best, or median, divided by that one's."""
    note: str = ""


class Machine(Struct, kw_only=True):
    """Where the figures come from. They say little without it."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    file_system: str
    directory: str


class Results(Struct, kw_only=True):
    """One run, as it is written to JSON."""

    date: str
    arguments: list[str]
    took_s: float
    machine: Machine
    versions: dict[str, str]
    revision: str
    load_before: float
    """The one-minute load average before the run: how much others had to do."""
    fsync_ms: list[float]
    """One fsync before the run and one after it, the median of many: a disk that others use is slower."""
    figures: list[Figure]

    def of(self, scenario: str) -> list[Figure]:
        return [figure for figure in self.figures if figure.scenario == scenario]


def figure(
    scenario: str,
    case: str,
    unit: str,
    samples: Sequence[float],
    *,
    better: Better = "higher",
    against: Mapping[str, Figure] | None = None,
    by: Literal["best", "median"] = "best",
    note: str = "",
) -> Figure:
    """Returns a figure with its ratio to each baseline that it is held `against`.

    A neighbour's noise only ever makes a round worse, and hits one case and not the other: so best is divided by best.
    Where both were sampled in turn, many times, medians say more.
    """
    best = max(samples) if better == "higher" else min(samples)
    median = statistics.median(samples)
    own = {"best": best, "median": median}[by]
    bases = {name: {"best": base.best, "median": base.median}[by] for name, base in (against or {}).items()}
    return Figure(
        scenario=scenario,
        case=case,
        unit=unit,
        better=better,
        samples=[significant(sample) for sample in samples],
        best=significant(best),
        median=significant(median),
        ratios={name: significant(own / base) for name, base in bases.items() if base},
        note=note,
    )


def percentiles(samples: Sequence[float], of: Sequence[int] = (50, 90, 99)) -> dict[int, float]:
    """Returns the asked percentiles, each a sample that was really seen."""
    ordered = sorted(samples)
    return {p: ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in of}


def by_percentile(
    scenario: str,
    case: str,
    unit: str,
    rounds: Sequence[Sequence[float]],
    *,
    of: Sequence[int] = (50, 90, 99),
    against: Mapping[str, Mapping[int, Figure]] | None = None,
    note: str = "",
) -> dict[int, Figure]:
    """Returns a figure per percentile; a round of many samples gives each of them one. A percentile is held against
    the baseline's same percentile."""
    seen = [percentiles(samples, of) for samples in rounds]
    return {
        p: figure(
            scenario,
            f"{case} p{p}",
            unit,
            [one[p] for one in seen],
            better="lower",
            against={name: base[p] for name, base in (against or {}).items()},
            note=note,
        )
        for p in of
    }


def significant(value: float, digits: int = 4) -> float:
    """Returns the value without the digits that mean nothing."""
    return float(f"{value:.{digits}g}")


def readable(value: float) -> str:
    """Returns the value as people read it: three digits that count."""
    if abs(value) >= 1000:
        return f"{significant(value, 3):,.0f}"
    return f"{value:.3g}" if value else "0"
