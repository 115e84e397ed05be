"""The benchmarks' command line: measure, show a table, write JSON, draw a chart, fill the README's table."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench import (
    backlog,
    contend,
    cycle,
    fairness,
    footprint,
    history,
    latency,
    limits,
    loads,
    profile,
    server,
    shards,
    spark,
    sweep,
    tasks,
    wakeup,
)
from bench.figures import Figure, Results
from bench.machine import describe_machine, fsync_ms, revision, versions
from bench.show import Progress, print_table
from bench.steps import Options

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
README = HERE / "README.md"

SCENARIOS: dict[str, Callable[[Options], list[Figure]]] = {
    "cycle": cycle.measure,
    "latency": latency.measure,
    "wakeup": wakeup.measure,
    "backlog": backlog.measure,
    "contend": contend.measure,
    "footprint": footprint.measure,
    "sweep": sweep.measure,
    "shards": shards.measure,
    "tasks": tasks.measure,
    "loads": loads.measure,
    "limits": limits.measure,
    "fairness": fairness.measure,
    "server": server.measure,
    "spark": spark.measure,
    "history": history.measure,
}
#: Prints instead of measuring, and only when it is named.
PROFILE = "profile"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for and returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = _parser().parse_args(given)
    if args.readme:
        from bench.readme import rewrite

        rewrite(README, _read(args.json or LATEST))
        print(f"wrote the table of {README}")
        return 0
    directory = Path(args.dir).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    with Progress() as progress:
        options = Options(
            quick=args.quick,
            repeat=args.repeat or (2 if args.quick else 3),
            directory=directory,
            uvloop=not args.no_uvloop,
            say=progress.say,
        )
        chosen = args.only or list(SCENARIOS)
        if PROFILE in chosen:
            profile.show(options)
        results = _measure(options, [name for name in SCENARIOS if name in chosen], given, progress)
    if results.figures:
        _tell(results, args)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measures dibs on this machine, each figure beside a baseline of the same run.",
        epilog="bench/README.md says what each scenario means.",
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer repeats: under a minute")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=[*SCENARIOS, PROFILE],
        help=f"only these scenarios: {', '.join(SCENARIOS)}; {PROFILE} runs only when it is named",
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="rounds of each measurement (default 3, quick 2)")
    parser.add_argument("--dir", default=_scratch(), help="where stores are made, on the disk to measure (%(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help=f"results (default {LATEST.relative_to(HERE.parent)})"
    )
    parser.add_argument("--chart", type=Path, metavar="PATH", help="chart (default: the results' path, ending in .png)")
    parser.add_argument("--no-uvloop", action="store_true", help="use asyncio's own event loop")
    parser.add_argument("--readme", action="store_true", help="measure nothing: put the results into bench/README.md")
    return parser


def _scratch() -> str:
    """Not /tmp, which is often in memory, where an fsync costs nothing."""
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else "."


def _measure(options: Options, chosen: list[str], given: list[str], progress: Progress) -> Results:
    started = datetime.datetime.now(datetime.UTC)
    start_s, load = time.perf_counter(), os.getloadavg()[0]
    measured = revision()
    fsync_before_ms = fsync_ms(options.directory)
    figures: list[Figure] = []
    for name in chosen:
        scenario_s = time.perf_counter()
        found = SCENARIOS[name](options)
        progress.done(name, found, time.perf_counter() - scenario_s)
        figures += found
    return Results(
        date=started.isoformat(timespec="seconds"),
        arguments=given,
        took_s=round(time.perf_counter() - start_s, 1),
        machine=describe_machine(options.directory),
        versions=versions(options),
        revision=measured,
        load_before=round(load, 2),
        fsync_ms=[fsync_before_ms, fsync_ms(options.directory)],
        figures=figures,
    )


def _tell(results: Results, args: argparse.Namespace) -> None:
    path: Path = args.json or LATEST
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    print_table(results)
    print(f"wrote {path}")
    try:
        from bench.chart import draw
    except ImportError:
        print("matplotlib is not installed: no chart")
        return
    chart: Path = args.chart or path.with_suffix(".png")
    draw(results, chart)
    print(f"wrote {chart}")


def _read(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)


if __name__ == "__main__":
    sys.exit(main())
