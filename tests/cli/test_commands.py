"""What the commands do, and the JSON they write."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from dibs.cli import COMMANDS, run
from dibs.ids import id_to_text
from dibs.stores import open_store
from dibs.stores.ordered.keys import queue_keys
from dibs.stores.ordered.store import OrderedStore
from dibs.task import Enqueued, NewTask
from tests.cli.conftest import LONG, Filled

TASK_FIELDS = [
    "id", "tenant", "command", "status", "place", "priority", "attempts", "max_attempts", "releases", "key", "codec",
    "payload", "enqueued_at", "due_at", "expires_at", "ended_at", "kept_until_at", "worker", "lease_end_at",
    "cancel_requested", "progress", "timeout_s", "reason", "error", "result", "traceparent",
    "limit_key", "limit_cost",
]  # fmt: skip


class Shell:
    """Calls of the command line within this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *args: str, code: int = 0) -> str:
        """Returns what the command wrote to stdout."""
        self._capfd.readouterr()
        ended = run(args)
        output = self._capfd.readouterr()
        assert ended == code, output
        self.err = output.err
        return output.out

    def json(self, *args: str, code: int = 0) -> Any:
        """Returns the document that the command wrote with --json."""
        return json.loads(self(*args, "--json", code=code))

    def lines(self, *args: str, code: int = 0) -> list[Any]:
        """Returns the JSON lines that the command wrote."""
        return [json.loads(line) for line in self(*args, "--json", code=code).splitlines()]


@pytest.fixture
def shell(capfd: pytest.CaptureFixture[str]) -> Shell:
    """Calls of the command line."""
    return Shell(capfd)


class TestEnqueue:
    """dibs enqueue."""

    def test_every_option(self, here: Filled, shell: Shell) -> None:
        """Each option reaches the task; the id that is printed is the task's."""
        task_id = shell(
            "enqueue", "mail", '{"to": 1}', "--priority", "7", "--delay", "90s", "--key", "k1", "--max-attempts", "3",
            "--lease", "2m", "--timeout", "1.5s", "--expires", "2h", "--result-ttl", "1h", "--retention", "2d",
            "--on-duplicate", "replay_dead", "--traceparent", "00-ab-cd-01", "--limit-key", "acme", "--limit-cost", "2",
        ).strip()  # fmt: skip
        task = shell.json("show", task_id)
        assert list(task) == TASK_FIELDS
        assert (task["payload"], task["priority"], task["key"], task["max_attempts"]) == ({"to": 1}, 7, "k1", 3)
        assert (task["timeout_s"], task["traceparent"], task["place"]) == (1.5, "00-ab-cd-01", "delayed")
        assert task["due_at"] > task["enqueued_at"]
        assert task["expires_at"] > task["due_at"]
        assert shell.json("show", "--by-key", "mail", "k1")["id"] == task_id

    def test_payloads(self, here: Filled, shell: Shell) -> None:
        """JSON is kept as it is written, msgpack is made of it, raw is taken as it is, none is an empty object."""
        (here.directory / "p").write_bytes(b"\x00\xff")
        assert self._payload(shell, "[1, 2.50]") == [1, 2.5]
        assert self._payload(shell) == {}
        assert self._payload(shell, '{"a": "é"}', "--codec", "msgpack") == {"a": "é"}
        assert self._payload(shell, "plain", "--codec", "raw") == {"$base64": "cGxhaW4="}
        assert self._payload(shell, "@p", "--codec", "raw") == {"$base64": "AP8="}
        assert self._payload(shell, "@p", "--codec", "mine") == {"$base64": "AP8="}

    def _payload(self, shell: Shell, *args: str) -> Any:
        return shell.json("show", shell.json("enqueue", "p", *args)["id"])["payload"]

    def test_run_at(self, here: Filled, shell: Shell) -> None:
        """A time with its zone is the moment it says."""
        made = shell.json("enqueue", "later", "--run-at", "2027-01-31T09:30:00.250+01:00")
        assert shell.json("show", made["id"])["due_at"] == "2027-01-31T08:30:00.250Z"

    def test_duplicates(self, here: Filled, shell: Shell) -> None:
        """A taken key gives the first task, an id of one's own may be repeated, and either is told."""
        first = shell.json("enqueue", "a", "--key", "k")
        second = shell.json("enqueue", "a", "--key", "k")
        assert (first["outcome"], second["outcome"], second["status"]) == ("enqueued", "duplicate", "PENDING")
        assert first["id"] == second["id"]
        assert list(first) == list(second)
        mine = here.ids["ready"][:-4] + "0000"
        assert shell.json("enqueue", "a", "--id", mine)["outcome"] == "enqueued"
        assert shell.json("enqueue", "a", "--id", mine)["outcome"] == "already"
        assert (
            shell.json("enqueue", "thumbnail", "--key", "failed", "--on-duplicate", "replay_dead")["outcome"]
            == "replayed"
        )

    def test_lines(self, here: Filled, shell: Shell) -> None:
        """One task per line, in order; a bad line is named and does not stop the others."""
        lines = ['{"sku": 1}', "", "not json", '{"sku": "b"}', '{"sku": 1}', '{"name": 2}']
        (here.directory / "rows").write_text("\n".join(lines))
        rows = shell.lines("enqueue", "import", "--lines", "@rows", "--key-field", "sku", code=1)
        assert [(row["line"], row["outcome"]) for row in rows] == [
            (1, "enqueued"), (3, "rejected"), (4, "enqueued"), (5, "duplicate"), (6, "rejected"),
        ]  # fmt: skip
        assert "2 tasks enqueued, 1 duplicate, 2 rejected." in shell.err
        assert shell("enqueue", "import", "--lines", "@rows", "--quiet", code=1) == ""
        assert "line 3:" in shell.err

    def test_many_lines(self, here: Filled, shell: Shell) -> None:
        """More than a batch holds are all enqueued, in their order."""
        (here.directory / "rows").write_text("\n".join(map(str, range(2500))))
        ids = shell("enqueue", "many", "--lines", "@rows").split()
        assert len(set(ids)) == 2500
        found = shell.json("ls", "-c", "many", "--place", "ready", "--all")["tasks"]
        assert [task["payload"] for task in found] == list(range(2500))


class TestListing:
    """dibs ls and dibs dead ls."""

    def test_filters(self, here: Filled, shell: Shell) -> None:
        """Each filter chooses, and all together must match."""
        assert self._ids(shell, "--status", "completed") == [here.ids["completed"]]
        assert self._ids(shell, "--place", "leased", "-c", "thumbnail") == [here.ids["leased"]]
        assert self._ids(shell, "-c", LONG, "--place", "delayed") == [here.ids["delayed"]]
        assert self._ids(shell, "--reason", "FAILED", "--worker", "a worker with a long name") == [here.ids["failed"]]
        assert self._ids(shell, "-c", "report", "--status", "FAILED") == []
        assert self._ids(shell, "--older-than", "1h") == []
        assert len(self._ids(shell, "--newer-than", "1h")) == len(here.ids)
        assert self._ids(shell, "--tenant", "acme") != self._ids(shell)

    def _ids(self, shell: Shell, *args: str) -> list[str]:
        return [task["id"] for task in shell.json("ls", *args)["tasks"]]

    def test_pages(self, here: Filled, shell: Shell) -> None:
        """A limited listing says where to go on; going on, or --all, gives the rest."""
        everything = shell.json("ls", "--all")
        assert everything["cursor"] is None
        first = shell.json("ls", "-n", "3")
        rest = shell.json("ls", "--cursor", first["cursor"])
        assert first["tasks"] + rest["tasks"] == everything["tasks"]
        assert all(list(task) == TASK_FIELDS for task in everything["tasks"])
        shell("ls", "-n", "3")
        assert f"--cursor {first['cursor']}" in shell.err

    def test_nothing(self, here: Filled, shell: Shell) -> None:
        """An empty listing is empty, and says so beside the output."""
        assert shell("ls", "-c", "nothing") == ""
        assert shell.err == "No task matches.\n"
        assert shell.json("ls", "-c", "nothing") == {"tasks": [], "cursor": None}

    def test_dead(self, here: Filled, shell: Shell) -> None:
        """Dead letters only, whatever else there is."""
        [task] = shell.json("dead", "ls")["tasks"]
        assert (task["id"], task["error"]["type"]) == (here.ids["failed"], "requests.exceptions.ConnectionError")
        assert shell.json("dead", "ls", "--older-than", "1h")["tasks"] == []
        assert shell.json("dead", "show", here.ids["failed"])["id"] == here.ids["failed"]


class TestTask:
    """dibs show, wait, cancel."""

    def test_show(self, here: Filled, shell: Shell) -> None:
        """A task that completed has its result; one that failed its error and traceback, on the screen too."""
        assert shell.json("show", here.ids["completed"])["result"]["value"] == {"ok": True}
        assert shell.json("show", here.ids["failed"])["error"]["traceback"].startswith("Traceback")
        text = shell("show", here.ids["failed"])
        assert "    go()" in text
        assert "\\x1b[2J" in text
        assert "\x1b" not in text
        assert "日本語" in shell("show", here.ids["ready"])
        assert "2 bytes" in shell("show", here.ids["binary"])

    def test_show_what_limits_it(self, here: Filled, shell: Shell) -> None:
        """A task with a limit_key says so, with what it costs; one without has nothing to say of it on the screen."""

        async def put() -> str:
            async with await open_store("./dibs-data") as store:
                task = NewTask(command="report", limit_key="acme", limit_cost=3)
                [outcome] = await store.enqueue("default", [task])
                assert isinstance(outcome, Enqueued)
                return id_to_text(outcome.id)

        limited = asyncio.run(put())
        shown = shell.json("show", limited)
        assert (shown["limit_key"], shown["limit_cost"]) == ("acme", 3)
        words = shell("show", limited).split()
        assert "acme" in words
        assert words[words.index("cost") + 1] == "3"
        shown = shell.json("show", here.ids["ready"])
        assert (shown["limit_key"], shown["limit_cost"]) == (None, 1)
        assert "limit" not in shell("show", here.ids["ready"])

    def test_events(self, here: Filled, shell: Shell) -> None:
        """With --events comes the task's own history, in order."""
        events = shell.json("show", here.ids["failed"], "--events")["events"]
        assert [event["kind"] for event in events] == ["enqueued", "claimed", "failed"]
        assert "lease" in shell("show", here.ids["leased"], "--events")

    @pytest.mark.parametrize(
        ("names", "code"),
        [(["completed"], 0), (["completed", "completed"], 0), (["completed", "failed"], 1), (["cancelled"], 1),
         (["leased"], 5), (["leased", "completed"], 5), (["leased", "failed"], 1)],
        ids=str,
    )  # fmt: skip
    def test_wait(self, here: Filled, shell: Shell, names: list[str], code: int) -> None:
        """The exit code is the outcome: all completed, one ended otherwise, or time ran out. A line for each end."""
        ids = [here.ids[name] for name in names]
        rows = shell.lines("wait", *ids, "--timeout", "50ms", code=code)
        assert {row["id"] for row in rows} == {task_id for task_id in ids if task_id != here.ids["leased"]}

    def test_cancel(self, here: Filled, shell: Shell) -> None:
        """What waits is cancelled, what runs is told, what ended is left; by id and by key."""
        rows = shell.json("cancel", here.ids["ready"], here.ids["leased"], "--by-key", "thumbnail", "retried")[
            "cancelled"
        ]
        assert [row["outcome"] for row in rows] == ["cancelled", "cancelling", "cancelled"]
        assert shell.json("cancel", here.ids["completed"], code=1)["cancelled"][0]["outcome"] == "ended"
        assert shell.json("show", here.ids["leased"])["cancel_requested"]
        assert "had ended: COMPLETED" in shell("cancel", here.ids["completed"], code=1)


class TestDead:
    """dibs dead replay and purge."""

    def test_replay(self, here: Filled, shell: Shell) -> None:
        """A dead letter goes back to its queue; what is not dead is left alone and told."""
        failed, completed = here.ids["failed"], here.ids["completed"]
        assert shell.json("dead", "replay", failed, completed, code=4) == {"replayed": 1, "not_dead": [completed]}
        task = shell.json("show", failed)
        assert (task["place"], task["attempts"]) == ("ready", 0)
        assert shell.json("dead", "replay", "--all") == {"replayed": 0, "not_dead": []}

    @pytest.mark.parametrize(
        "which", [["--all"], ["-c", "thumbnail"], ["--reason", "FAILED", "--newer-than", "1h"]], ids=str
    )
    def test_purge(self, here: Filled, shell: Shell, which: list[str]) -> None:
        """All that match go, and nothing that is not a dead letter."""
        before = shell.json("ls", "--all")["tasks"]
        assert shell("dead", "purge", *which, "--yes") == "1 dead letter purged.\n"
        after = shell.json("ls", "--all")["tasks"]
        assert [task["id"] for task in before if task["id"] != here.ids["failed"]] == [task["id"] for task in after]

    def test_purge_by_id_is_about_dead_letters(self, here: Filled, shell: Shell) -> None:
        """An id of a task that completed is not purged by mistake."""
        shell("dead", "purge", here.ids["completed"], "--yes", code=4)
        assert shell.json("show", here.ids["completed"])["status"] == "COMPLETED"


class TestQueues:
    """dibs queues, pause, resume, configure, workers, stats."""

    def test_queues(self, here: Filled, shell: Shell) -> None:
        """Every queue has its counts and its configuration; names choose."""
        found = {queue["command"]: queue for queue in shell.json("queues")["queues"]}
        assert set(found) == {"thumbnail", "report", LONG}
        assert (found["report"]["ready"], found["report"]["paused"], found["report"]["config"]["lease_s"]) == (
            2,
            True,
            300,
        )
        assert [found["thumbnail"][place] for place in ("ready", "delayed", "leased", "dead")] == [0, 1, 1, 1]
        assert [queue["command"] for queue in shell.json("queues", "report")["queues"]] == ["report"]
        assert "paused lease=5m" in shell("queues")

    def test_pause_and_resume(self, here: Filled, shell: Shell) -> None:
        """Pausing changes nothing else that is configured; a queue that nobody used is pointed out."""
        assert shell.json("resume", "report")["config"]["paused"] is False
        config = shell.json("pause", "report")["config"]
        assert (config["paused"], config["lease_s"]) == (True, 300)
        shell("pause", "reprot")
        assert "check the name" in shell.err

    def test_limits(self, here: Filled, shell: Shell) -> None:
        """Limits are set one by one, shown in a few words, and forgotten together; `*` is the whole tenant."""
        shell.json("configure", "mail", "--in-flight", "9", "--key-rate", "120/m")
        config = shell.json("configure", "mail", "--key-in-flight", "2", "--key-burst", "4")["config"]
        assert config["limits"] == {"in_flight": 9, "per_key": {"in_flight": 2, "rate": 2.0, "burst": 4.0}}
        assert "in-flight=9 key-in-flight=2 key-rate=2/s key-burst=4" in shell("configure", "mail", "--lease", "60s")
        shell.json("configure", "*", "--in-flight", "50", "--weight", "3")
        told = shell.json("queues")
        assert (told["config"]["limits"]["in_flight"], told["config"]["weight"]) == (50, 3)
        assert "*" not in {queue["command"] for queue in told["queues"]}
        assert shell.json("configure", "mail", "--no-limits")["config"]["limits"] is None
        assert shell.json("configure", "*", "--reset")["config"]["weight"] is None

    def test_limits_that_make_no_sense(self, here: Filled, shell: Shell) -> None:
        """A rate or number that is none, a burst without a rate, a queue's weight: refused with a reason."""
        for flags in (["mail", "--key-rate", "5/x"], ["mail", "--key-burst", "3"], ["mail", "--weight", "3"]):
            shell("configure", *flags, code=2)
        for flag, value, says in (
            ("--key-rate", "nan/s", "'nan/s': give a rate from 1/d to 1000000/s"),
            ("--key-rate", "0.5/d", "'0.5/d': give a rate from 1/d"),
            ("--key-burst", "nan", "'nan': give a number from 1 to 1000000"),
            ("--in-flight", "99999999999999999999", "is not in the range 1<=x<=1000000"),
        ):
            shell("configure", "mail", flag, value, code=2)
            assert says in shell.err

    @pytest.mark.parametrize("rate", ["5/s", "100/m", "1/h", "1000/h", "1/d", "1000000/s"])
    def test_rates_are_shown_as_they_are_written(self, here: Filled, shell: Shell, rate: str) -> None:
        """A rate is told in the unit that makes it shortest."""
        assert f"key-rate={rate}." in shell("configure", "mail", "--key-rate", rate)

    def test_configure(self, here: Filled, shell: Shell) -> None:
        """What is given is set, what is not stays; --reset forgets all but the pause."""
        config = shell.json("configure", "report", "--priority", "7", "--dead-retention", "30d")["config"]
        assert (config["priority"], config["dead_retention_s"], config["lease_s"]) == (7, 30 * 86_400, 300)
        config = shell.json("configure", "report", "--reset")["config"]
        assert config == {name: True if name == "paused" else None for name in config}

    def test_workers(self, here: Filled, shell: Shell) -> None:
        """What a worker told about itself."""
        [worker] = shell.json("workers")["workers"]
        assert (worker["pid"], worker["slots"], worker["busy"], worker["commands"]) == (4711, 8, 3, ["thumbnail", LONG])
        assert shell("workers", "--tenant", "acme") == ""

    def test_stats(self, here: Filled, shell: Shell) -> None:
        """One tenant's totals, or every tenant's."""
        [mine] = shell.json("stats")["tenants"]
        assert (mine["tenant"], mine["ready"], mine["dead"], mine["paused"]) == ("default", 2, 1, ["report"])
        assert [row["tenant"] for row in shell.json("stats", "--tenant", "*")["tenants"]] == ["acme", "default"]
        assert shell("stats", "--tenant", "*").count("\n") == 3


class TestStore:
    """dibs export, sweep, backup, restore, doctor, config, bench, top."""

    def test_export(self, here: Filled, shell: Shell) -> None:
        """Every event once, in order; a cursor goes on; a file is the same; * is everybody's."""
        text = shell("export")
        events = [json.loads(line) for line in text.splitlines()]
        assert [event["cursor"] for event in events] == sorted({event["cursor"] for event in events})
        first = shell("export", "-n", "3")
        assert first + shell("export", "--after", json.loads(first.splitlines()[-1])["cursor"]) == text
        shell("export", "-o", "events.jsonl")
        assert (here.directory / "events.jsonl").read_text() == text
        assert f"{len(events)} events; go on with --after " in shell.err
        assert shell("export", "--after", shell.err.split()[-1]) == ""
        assert {json.loads(line)["tenant"] for line in shell("export", "--tenant", "*").splitlines()} == {
            "acme",
            "default",
        }
        assert shell("export", "--after", events[-1]["cursor"]) == ""
        assert not list(here.directory.glob("*.part"))

    def test_export_parquet(self, here: Filled, shell: Shell) -> None:
        """Parquet has a row per event and times that are times."""
        parquet = pytest.importorskip("pyarrow.parquet")
        shell("export", "-o", "events.parquet")
        rows = parquet.read_table(here.directory / "events.parquet").to_pylist()
        assert [row["cursor"] for row in rows] == [json.loads(line)["cursor"] for line in shell("export").splitlines()]
        assert rows[0]["at"].utcoffset().total_seconds() == 0

    def test_backup_and_restore(self, here: Filled, shell: Shell) -> None:
        """A backup restored is a clean store with the same tasks."""
        assert shell.json("backup", "copy")["bytes"] > 0
        assert shell.json("restore", "copy", "again")["directory"] == str(here.directory / "again")
        assert shell.json("--url", "again", "doctor")["clean"]
        assert shell("--url", "again", "ls", "--all", "--json") == shell("ls", "--all", "--json")

    def test_doctor(self, here: Filled, shell: Shell) -> None:
        """A sound store is clean, with or without --repair."""
        report = shell.json("doctor", "--repair")
        assert (report["clean"], report["problems"]) == (True, [])
        assert report["tasks"] == len(here.ids) + 1
        assert shell("doctor").startswith("Clean: ")

    def test_doctor_finds_and_repairs(self, here: Filled, shell: Shell) -> None:
        """What does not agree is listed, with exit code 1; --repair makes it agree."""

        async def damage() -> None:
            async with await open_store("./dibs-data") as store:
                assert isinstance(store, OrderedStore)
                lane = store._engine.lane()
                await lane.transact(lambda txn: txn.add(queue_keys("default", "report").counters[0], 5))

        asyncio.run(damage())
        assert shell.json("doctor", code=1)["problems"]
        assert "problem" in shell("doctor", code=1)
        assert shell("doctor", "--repair").startswith("Clean: ")
        assert shell.json("queues", "report")["queues"][0]["ready"] == 2

    def test_sweep(self, here: Filled, shell: Shell) -> None:
        """It says what it did."""
        assert set(shell.json("sweep")) == {"promoted", "expired", "cancelled", "pruned", "trimmed"}

    def test_config(self, here: Filled, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each setting with its value and origin; flags first, passwords masked, and no store is opened."""
        monkeypatch.setenv("DIBS_TENANT", "acme")
        rows = {
            row["name"]: row
            for row in shell.json("config", "--url", "redis://:s3cret@h", "--max-bytes", "2GiB")["settings"]
        }
        assert (rows["url"]["value"], rows["url"]["origin"]) == ("redis://:***@h", "flag")
        assert (rows["tenant"]["value"], rows["tenant"]["origin"]) == ("acme", "environment DIBS_TENANT")
        assert rows["max_bytes"]["value"] == 2**31
        assert "2GiB" in shell("config", "--max-bytes", "2GiB")

    def test_flags_before_and_after(self, here: Filled, shell: Shell) -> None:
        """An option means the same on either side of the command, and the nearer one wins."""
        assert shell("--tenant", "acme", "--json", "ls") == shell("ls", "--json", "--tenant", "acme")
        assert shell("--tenant", "nobody", "ls", "--json", "--tenant", "acme") == shell(
            "ls", "--json", "--tenant", "acme"
        )
        assert shell("--tenant", "acme", "dead", "--json", "ls") == shell("dead", "ls", "--json", "--tenant", "acme")

    def test_bench(self, here: Filled, shell: Shell) -> None:
        """It measures on a store of its own and leaves nothing behind."""
        before = sorted(here.directory.iterdir())
        found = shell.json(
            "bench", "--dir", ".", "--seconds", "10ms", "--batch", "1", "--batch", "50", "--callers", "2"
        )
        assert [row["batch"] for row in found["rows"]] == [1, 50]
        assert all(row["cycles_per_s"] > 0 for row in found["rows"])
        assert sorted(here.directory.iterdir()) == before
        assert shell("bench", "--seconds", "1ms", "--batch", "1").splitlines()[0].split()[0] == "BATCH"

    def test_top(self, here: Filled, shell: Shell) -> None:
        """A frame has totals, queues with rates, and workers."""
        frame = shell.json("top", "--once", "--interval", "0s")
        assert frame["total"]["ready"] == 2
        assert {"in_per_s", "done_per_s", "failed_per_s", "oldest_ready_at", "paused"} <= set(frame["queues"][0])
        assert frame["workers"][0]["pid"] == 4711


def test_the_breadth() -> None:
    """Every command of the table is called by some test here or has a suite of its own."""
    called = Path(__file__).read_text() + (Path(__file__).parent / "test_help.py").read_text()
    elsewhere = {"worker", "demo", "serve", "token", "spark", "history"}
    assert [name for name in COMMANDS if f'"{name}"' not in called and name not in elsewhere] == []
