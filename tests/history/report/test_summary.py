"""What a report says, against the rows that it is made of."""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from dibs.errors import InvalidOption, LakeError
from dibs.history.report import Files, Summary, short, summary, write
from dibs.history.report.advice import Advice, Hour, advise
from dibs.history.report.ended import percentile_ms
from dibs.history.report.minutes import ROWS_MAX
from dibs.history.report.queues import QUEUES_MAX
from dibs.history.report.words import duration_text, share_text
from tests.history.report import lakes

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def summed(busy: Path) -> Summary:
    """What is said of three days."""
    return summary(busy)


@functools.cache
def rows(lake: Path, table: str) -> Rows:
    """A table's rows, as they were written; days are texts."""
    return list(ds.dataset(lake / table, partitioning="hive").to_table().to_pylist())


class TestQueues:
    """Counts, steps and durations of queues."""

    def test_totals_are_the_sums_of_the_minutes(self, busy: Path, summed: Summary) -> None:
        """Every count of every queue."""
        for name in ("arrivals", "claims", "completions", "failures", "retries", "expiries", "cancellations"):
            expected: Counter[tuple[str, str]] = Counter()
            for row in rows(busy, "queue_minutes"):
                expected[row["tenant"], row["command"]] += row[name]
            found = {(queue.tenant, queue.command): getattr(queue.totals, name) for queue in summed.queues}
            assert found == dict(expected)

    def test_the_busiest_come_first(self, summed: Summary) -> None:
        """By arrivals and deliveries."""
        work = [queue.totals.arrivals + queue.totals.claims for queue in summed.queues]
        assert work == sorted(work, reverse=True)

    def test_steps_add_up_counts_and_keep_the_highest_of_the_rest(self, busy: Path, summed: Summary) -> None:
        """Three days have steps of five minutes."""
        assert summed.step_s == 300
        queue = summed.queues[0]
        start = datetime.combine(lakes.BEGAN.date(), datetime.min.time(), lakes.BEGAN.tzinfo)
        steps: dict[int, Rows] = {}
        for row in rows(busy, "queue_minutes"):
            if (row["tenant"], row["command"]) == (queue.tenant, queue.command):
                steps.setdefault(int((row["minute"] - start).total_seconds()) // 300, []).append(row)
        assert queue.series["at"] == sorted(steps)
        for at, *found in zip(
            *(queue.series[name] for name in ("at", "retries", "backlog", "wait_p95_ms", "oldest_ms")), strict=True
        ):
            assert at is not None
            known = [row["wait_p95_ms"] for row in steps[at] if row["wait_p95_ms"] is not None]
            ages = [row["oldest_ms"] for row in steps[at] if row["oldest_ms"] is not None]
            assert found[0] == sum(row["retries"] for row in steps[at])
            assert found[1] == max(row["backlog"] for row in steps[at])
            assert found[2] == (round(max(known)) if known else None)
            assert found[3] == (max(ages) if ages else None)

    def test_the_end_is_the_last_minute(self, busy: Path, summed: Summary) -> None:
        """What waits and runs there, and for how long."""
        last = lakes.HORIZON.replace(second=0)
        for queue in summed.queues:
            found = [
                row
                for row in rows(busy, "queue_minutes")
                if (row["minute"], row["tenant"], row["command"]) == (last, queue.tenant, queue.command)
            ]
            assert queue.end.backlog == sum(row["backlog"] for row in found)
            assert queue.end.running == sum(row["running"] for row in found)
            assert queue.end.oldest_ms == (found[0]["oldest_ms"] if found else None)

    @pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
    def test_percentiles_of_tasks_are_within_their_class(self, busy: Path, summed: Summary, share: float) -> None:
        """2.2 % is promised, for one queue and for all."""
        all_tasks = rows(busy, "tasks")
        for queues in (summed.queues, summed.queues[:1]):
            names = {(queue.tenant, queue.command) for queue in queues}
            runs = sorted(row["run_ms"] for row in all_tasks if (row["tenant"], row["command"]) in names)
            exact = statistics.quantiles(runs, n=1000, method="inclusive")[round(share * 1000) - 1]
            assert percentile_ms([queue.runs for queue in queues], share) == pytest.approx(exact, rel=0.025)

    def test_the_slowest_of_each_queue(self, busy: Path, summed: Summary) -> None:
        """Twenty of each, longest first, by run and by wait."""
        for found, name in ((summed.longest_runs, "run_ms"), (summed.longest_waits, "wait_ms")):
            for number, queue in enumerate(summed.queues):
                everything = sorted(
                    (row[name] for row in rows(busy, "tasks")
                     if (row["tenant"], row["command"]) == (queue.tenant, queue.command)), reverse=True
                )  # fmt: skip
                assert [getattr(task, name) for task in found if task.queue == number] == everything[:20]


class TestDays:
    """Which days a report is of."""

    def test_the_last_seven_that_the_lake_knows(self, summed: Summary) -> None:
        """From its first event to its last."""
        assert (summed.begin, summed.end) == (lakes.BEGAN, lakes.HORIZON)

    def test_a_day_is_counted_alone(self, busy: Path) -> None:
        """All tables are cut to the days that are asked for; a day has steps of a minute."""
        day = date(2026, 11, 13)
        one = summary(busy, since=day, until=day)
        assert one.step_s == 60
        minutes = [row for row in rows(busy, "queue_minutes") if row["date"] == str(day)]
        assert sum(queue.totals.arrivals for queue in one.queues) == sum(row["arrivals"] for row in minutes)
        errors = [row for row in rows(busy, "error_groups") if row["date"] == str(day)]
        assert sum(fault.count for fault in one.faults) == sum(row["count"] for row in errors)
        assert {task.ended_at.date() for task in one.longest_runs} == {day}
        assert summary(busy, days=2, until=date(2026, 11, 13)).begin == lakes.BEGAN
        assert summary(busy, days=1).begin == lakes.HORIZON.replace(hour=0, minute=0, second=0)

    def test_days_that_the_lake_does_not_know_are_empty(self, busy: Path, tmp_path: Path) -> None:
        """And so is a lake that knows nothing."""
        before = summary(busy, until=date(2020, 1, 1))
        assert before.begin is None
        assert short(before) == ["shop-lake: nothing is known of these days"]
        assert summary(lakes.empty_lake(tmp_path / "new")).queues == []

    @pytest.mark.parametrize(
        "asked",
        [
            {"days": 0},
            {"days": 2, "since": date(2026, 11, 13)},
            {"since": date(2026, 11, 14), "until": date(2026, 11, 13)},
        ],
        ids=["no days", "two ways", "backwards"],
    )
    def test_days_that_make_no_sense_are_refused(self, busy: Path, asked: dict[str, Any]) -> None:
        """Before anything is read."""
        with pytest.raises(InvalidOption):
            summary(busy, **asked)

    def test_a_directory_that_is_no_lake(self, tmp_path: Path) -> None:
        """The message says how to make one."""
        with pytest.raises(LakeError, match="dibs history run"):
            summary(tmp_path)


class TestGroups:
    """Errors, workers and tenants over several days."""

    def test_an_error_group_spans_its_days(self, busy: Path, summed: Summary) -> None:
        """Counts are added up, the sample is the first, all its queues are named; the commonest comes first."""
        days = [
            row for row in rows(busy, "error_groups") if (row["tenant"], row["fingerprint"]) == ("acme", "3f9c0d21")
        ]
        first = min(days, key=lambda row: row["first_seen"])
        fault = summed.faults[0]
        assert (fault.count, fault.deaths) == (sum(row["count"] for row in days), sum(row["deaths"] for row in days))
        assert (fault.first_seen, fault.sample_id) == (first["first_seen"], first["sample_id"])
        assert fault.last_seen == max(row["last_seen"] for row in days)
        wide = next(one for one in summed.faults if (one.tenant, one.fingerprint) == ("globex", "8a11b7e4"))
        assert wide.commands == ["mail.send", "report"]

    def test_busy_time_is_that_of_all_workers(self, busy: Path, summed: Summary) -> None:
        """Of each queue, and of each worker in it."""
        expected: Counter[tuple[str, str, str]] = Counter()
        for row in rows(busy, "workers"):
            expected[row["tenant"], row["command"], row["worker"]] += row["busy_ms"]
        queues = summed.queues
        found = {
            (queues[one.queue].tenant, queues[one.queue].command, one.worker): one.busy_ms for one in summed.workers
        }
        assert found == dict(expected)
        assert sum(queue.busy_ms for queue in queues) == sum(expected.values())

    def test_a_day_without_waits_counts_in_the_mean(self, tmp_path: Path) -> None:
        """Ten deliveries that waited 100 ms on one day and ten that waited 0 ms on the next have a mean of 50 ms."""
        day = {"tenant": "acme", "arrivals": 10, "deliveries": 10, "completions": 10, "failures": 0, "busy_ms": 10}
        first = {**day, "wait_ms": 1000, "wait_mean_ms": 100.0, "date": date(2026, 11, 13)}
        second = {**day, "wait_ms": 0, "wait_mean_ms": 0.0, "date": date(2026, 11, 14)}
        lake = lakes.write_lake(
            tmp_path / "lake", {"tenants": [first, second]}, began=lakes.BEGAN, horizon=lakes.HORIZON
        )
        assert summary(lake).tenants[0].wait_mean_ms == 50

    def test_tenants_share_the_work(self, busy: Path, summed: Summary) -> None:
        """Shares are of the whole span, not means of days."""
        assert sum(tenant.work_share for tenant in summed.tenants) == pytest.approx(1)
        assert sum(tenant.wait_share for tenant in summed.tenants) == pytest.approx(1)
        days = [row for row in rows(busy, "tenants") if row["tenant"] == "globex"]
        globex = next(tenant for tenant in summed.tenants if tenant.tenant == "globex")
        began = sum(row["wait_ms"] / row["wait_mean_ms"] for row in days)
        assert globex.wait_mean_ms == pytest.approx(sum(row["wait_ms"] for row in days) / began)


class TestAdvice:
    """Sentences about workers."""

    @staticmethod
    def said(*hours: tuple[int | None, int, float | None]) -> Advice | None:
        """What is said of hours of (needed, ran, wait)."""
        noon = datetime(2026, 11, 14, 12, tzinfo=lakes.BEGAN.tzinfo)
        made = [Hour(noon + timedelta(hours=index), *hour) for index, hour in enumerate(hours)]
        return advise(0, "`resize`", made, 2.0, 0.95)

    def test_short_of_workers(self) -> None:
        """Tasks waited too long, and fewer ran than were needed: the worst hour is told."""
        found = self.said((2, 4, 100.0), (5, 4, 3_000.0), (6, 4, 38_000.0))
        assert found is not None
        assert found.kind == "short"
        assert found.text == (
            "At Sat 14 Nov 14:00 `resize` needed 6 workers for a p95 wait under 2 s; 4 ran, and p95 was 38 s. "
            "It was short in 2 of 3 hours."
        )

    def test_long_waits_with_enough_workers_are_bursts(self) -> None:
        """More workers by the hour would not have been the cause."""
        found = self.said((2, 4, 9_000.0))
        assert found is not None
        assert found.kind == "bursts"
        assert found.text.startswith("At Sat 14 Nov 12:00 `resize` had a p95 wait of 9 s although 4 ran and 2 would do")

    def test_more_than_enough(self) -> None:
        """Even the busiest hour needed less than half."""
        found = self.said((3, 10, 10.0), (2, 4, 10.0))
        assert found is not None
        assert found.kind == "ample"
        assert "needed 3 workers for a p95 wait under 2 s; up to 10 ran." in found.text

    def test_enough_although_fewer_were_busy_than_the_formula_says(self) -> None:
        """Idle workers leave no trace: where nobody waited, nothing was missing."""
        found = self.said((3, 2, 10.0))
        assert found is not None
        assert found.kind == "enough"

    def test_nothing_is_said_of_hours_in_which_nothing_ended(self) -> None:
        """There is no run to reckon with."""
        assert self.said((None, 0, None)) is None


class TestSize:
    """A page has a size, whatever the lake's."""

    def test_many_queues_are_cut_and_joined(self, tmp_path: Path) -> None:
        """The busiest are shown one by one, the others as one; steps get longer; nothing is lost from the sums."""
        queues, minutes = QUEUES_MAX + 10, 1_000
        start = datetime(2026, 11, 14, 0, 0, tzinfo=lakes.BEGAN.tzinfo)
        made = [
            lakes.minute(start + timedelta(minutes=at), f"t{queue % 7}", f"q{queue}", arrivals=1 + queue)
            for queue in range(queues)
            for at in range(minutes)
        ]
        lake = lakes.write_lake(
            tmp_path / "lake", {"queue_minutes": made}, began=start, horizon=start + timedelta(minutes=minutes)
        )
        summed = summary(lake)
        assert summed.left_out.queues == 10
        assert len(summed.queues) == QUEUES_MAX + 1
        assert summed.queues[-1].command is None
        assert summed.step_s == 300
        assert sum(len(queue.series["at"]) for queue in summed.queues) <= ROWS_MAX
        assert sum(queue.totals.arrivals for queue in summed.queues) == sum(row["arrivals"] for row in made)
        assert write(summed, tmp_path / "report.html").stat().st_size < 5_000_000

    def test_a_commit_meanwhile_is_noticed(self, tmp_path: Path) -> None:
        """What was read may be half old then, and is read again."""
        files = Files(lakes.empty_lake(tmp_path / "lake"))
        assert not files.changed()
        lakes.write_lake(tmp_path / "lake", {}, commits=1)
        assert files.changed()

    def test_rows_of_a_queue_without_minutes_are_left_out(self, tmp_path: Path) -> None:
        """Tables that do not fit together, as after a run that was cut short, still make a report."""
        at = lakes.HORIZON.replace(second=0)
        task = {"ended_at": at, "outcome": "completed", "deliveries": 1, "run_ms": 5, "date": at.date(), "id": "1"}
        lake = lakes.write_lake(
            tmp_path / "lake",
            {
                "queue_minutes": [lakes.minute(at)],
                "tasks": [{**task, "tenant": "acme", "command": name} for name in ("resize", "ghost")],
                "workers": [{"tenant": "acme", "command": "ghost", "worker": "w", "busy_ms": 5, "date": at.date()}],
            },
            began=at,
            horizon=at,
        )
        summed = summary(lake)
        assert [task.command for task in summed.longest_runs] == ["resize"]
        assert summed.workers == []

    def test_times_as_spark_writes_them(self, busy: Path, tmp_path: Path, summed: Summary) -> None:
        """Timestamps of 96 bits, and rows of tasks that have not ended, change nothing."""
        lake = lakes.write_lake(tmp_path / "shop-lake", {}, began=lakes.BEGAN, horizon=lakes.HORIZON)
        for file in busy.rglob("*.parquet"):
            copy = lake / file.relative_to(busy)
            copy.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pq.read_table(file, partitioning=None), copy, use_deprecated_int96_timestamps=True)
        open_tasks = lake / "tasks" / "date=__HIVE_DEFAULT_PARTITION__"
        open_tasks.mkdir()
        some = next((busy / "tasks").rglob("*.parquet"))
        pq.write_table(pq.read_table(some, partitioning=None).slice(0, 5), open_tasks / "0.parquet")
        assert msgspec.json.encode(summary(lake)) == msgspec.json.encode(summed)


class TestShort:
    """The terminal's version."""

    def test_it_says_what_matters(self, summed: Summary) -> None:
        """Headline numbers, advice, errors, slowest."""
        text = "\n".join(short(summed))
        assert text.startswith("shop-lake: Thu 12 Nov 00:00 to Sat 14 Nov 18:42 UTC\n")
        assert f"{sum(queue.totals.arrivals for queue in summed.queues):,} tasks arrived" in text
        assert "\nworkers  At Sat 14 Nov" in text
        assert "x ConnectionError: connect to 10.4.0.17:6379 refused" in text
        assert summed.longest_runs[0].id in text

    def test_nothing_in_it_steers_a_terminal(self, summed: Summary) -> None:
        """Whatever a task's error said."""
        nasty = msgspec.structs.replace(summed.faults[0], sample="\x1b[31m\u202ered\r\n" * 99, error_type="\x07")
        lines = short(msgspec.structs.replace(summed, faults=[nasty]))
        assert all(line.isprintable() for line in lines)

    @pytest.mark.parametrize(
        ("ms", "text"),
        [
            (0, "0 ms"), (999.4, "999 ms"), (999.9, "1 s"), (1_240, "1.2 s"), (9_949, "9.9 s"), (9_960, "10 s"),
            (59_400, "59 s"), (59_900, "1 min"), (200_000, "3 min 20 s"), (7_500_000, "2 h 5 min"),
            (3_599_900, "1 h"), (273_600_000, "3 d 4 h"),
        ],
    )  # fmt: skip
    def test_durations(self, ms: float, text: str) -> None:
        """Two units at most, and never 60 of one."""
        assert duration_text(ms) == text

    def test_shares_are_not_rounded_up_to_all(self) -> None:
        """One failure in a million is not none."""
        assert [share_text(share) for share in (0.5, 0.99999, 1.0)] == ["50.0 %", "99.9 %", "100 %"]
