"""The report in a few lines, for the terminal."""

from __future__ import annotations

from dibs.history.report.ended import percentile_ms
from dibs.history.report.minutes import Totals
from dibs.history.report.summary import Summary
from dibs.history.report.words import count_text, duration_text, plural, printable, share_text, time_text

ADVICE = 4
FAULTS = 3
SLOWEST = 3


def short(summed: Summary) -> list[str]:
    """Returns lines for the terminal: headline numbers, advice, the commonest errors, the slowest tasks.

    They can be printed as they are: what steers a terminal is not in them.
    """
    if summed.begin is None or summed.end is None:
        return [f"{printable(summed.lake)}: nothing is known of these days"]
    lines = [f"{printable(summed.lake)}: {time_text(summed.begin)} to {time_text(summed.end)} UTC"]
    lines += _headline(summed)
    lines += _section("workers", [printable(one.text) for one in summed.advice[:ADVICE]])
    lines += _section("errors", _faults(summed))
    lines += _section("slowest", _slowest(summed))
    return lines


def _headline(summed: Summary) -> list[str]:
    total = sum((queue.totals for queue in summed.queues), Totals())
    ended = total.completions + total.failures
    share = f" ({share_text(total.completions / ended)} of those that ran to an end)" if ended else ""
    lines = [f"{plural(total.arrivals, 'task')} arrived, {count_text(total.completions)} completed{share}"]
    lines.append(
        f"{count_text(total.failures)} failed, {count_text(total.retries)} retried, "
        f"{plural(total.expiries, 'lease')} lost, {count_text(total.cancellations)} cancelled"
    )
    waiting = sum(queue.end.backlog for queue in summed.queues)
    oldest_ms = max((queue.end.oldest_ms or 0 for queue in summed.queues), default=0)
    lines.append(f"{count_text(waiting)} waiting" + (f", the oldest for {duration_text(oldest_ms)}" if waiting else ""))
    wait_ms = percentile_ms([queue.waits for queue in summed.queues], 0.95)
    run_ms = percentile_ms([queue.runs for queue in summed.queues], 0.95)
    if wait_ms is not None and run_ms is not None:
        lines.append(
            f"p95 of the tasks that ended: {duration_text(wait_ms)} waiting, {duration_text(run_ms)} running "
            f"(aim: under {duration_text(summed.target_wait_s * 1000)} waiting)"
        )
    if summed.gaps:
        lines.append(
            f"{plural(len(summed.gaps), 'gap')}: events were trimmed before they were read; counts are too low"
        )
    return lines


def _faults(summed: Summary) -> list[str]:
    return [
        f"{count_text(fault.count)} x {printable(fault.error_type)}: {printable(fault.sample)[:100]} "
        f"({printable(', '.join(fault.commands))})"
        for fault in summed.faults[:FAULTS]
    ]


def _slowest(summed: Summary) -> list[str]:
    return [
        f"{duration_text(task.run_ms)} running, {duration_text(task.wait_ms)} waiting: {printable(task.command)} "
        f"{printable(task.id)}"
        for task in summed.longest_runs[:SLOWEST]
    ]


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"{title if index == 0 else '':<9}{line}" for index, line in enumerate(lines)]
