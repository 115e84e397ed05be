"""dibs enqueue --from: files of rows, all or nothing, once."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import fcntl
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from dibs.cli import run
from dibs.cli.rows import LINE_MAX_BYTES
from dibs.ids import chunk_id_of
from dibs.stores import open_store
from dibs.stores.loading import Load
from tests.cli.terminal import PATIENCE_S, dibs, on_terminal
from tests.cli.test_processes import started


class Shell:
    """Calls within this process, in a directory of their own."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self._capsys = capsys
        self.err = ""

    def __call__(self, *args: str, code: int = 0) -> str:
        """Runs a command, which must end with `code`; returns what it printed."""
        ended = run(args)
        printed, self.err = self._capsys.readouterr()
        assert ended == code, self.err
        return printed

    def load(self, content: str | bytes, *args: str, name: str = "rows.jsonl", code: int = 0) -> dict[str, Any]:
        """Loads a file of that content into `import`; returns what was told."""
        (self.directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return self.again(*args, name=name, code=code)

    def again(self, *args: str, name: str = "rows.jsonl", code: int = 0) -> dict[str, Any]:
        """Loads the file that is there."""
        told: dict[str, Any] = json.loads(self("enqueue", "import", "--from", name, "--json", *args, code=code) or "{}")
        return told

    def tasks(self, *args: str) -> list[dict[str, Any]]:
        """All tasks."""
        found: list[dict[str, Any]] = json.loads(self("ls", "--all", "--json", *args))["tasks"]
        return found

    def payloads(self) -> list[Any]:
        """The payloads of what is ready, in the order in which it is claimed."""
        return [task["payload"] for task in self.tasks("-c", "import", "--place", "ready")]

    def bad(self, name: str = "rows.jsonl") -> list[dict[str, Any]]:
        """What was set aside."""
        return [json.loads(line) for line in (self.directory / f"{name}.bad.jsonl").read_text().splitlines()]


@pytest.fixture
def shell(empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Calls in an empty directory, with nothing set."""
    for name in [name for name in os.environ if name.startswith("DIBS_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(empty)
    return Shell(empty, capsys)


class TestFormats:
    """What files may look like."""

    def test_json_lines(self, shell: Shell) -> None:
        """A value a line; a mark at the start, blank lines, spaces and any line ending make no difference."""
        told = shell.load(b'\xef\xbb\xbf{"a": 1}\r\n\n  [2] \n"three"\n4', name="rows.NDJSON")
        assert (told["enqueued"], told["already"], told["set_aside"]) == (4, False, 0)
        assert shell.payloads() == [{"a": 1}, [2], "three", 4]

    def test_csv(self, shell: Shell) -> None:
        """The first line names the fields; values are texts, empty ones null; quoted ones may have line breaks."""
        shell.load('\ufeffsku,name\r\n1,"a ""b"""\r\n\r\n"x\r\ny",\r\n', name="rows.csv")
        assert shell.payloads() == [{"sku": "1", "name": 'a "b"'}, {"sku": "x\r\ny", "name": None}]

    def test_parquet(self, shell: Shell) -> None:
        """A field for each column, of any type that JSON has a form for, in all row groups."""
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        at = datetime.datetime(2026, 11, 15, 8, 30, tzinfo=datetime.UTC)
        rows = [{"n": n, "x": n / 2, "at": at, "d": decimal.Decimal("1.50"), "l": [n, None]} for n in range(2500)]
        parquet.write_table(arrow.Table.from_pylist(rows), shell.directory / "rows.parquet", row_group_size=700)
        assert shell.again(name="rows.parquet")["enqueued"] == 2500
        payloads = shell.payloads()
        assert [payload["n"] for payload in payloads] == list(range(2500))
        assert payloads[1] == {"n": 1, "x": 0.5, "at": "2026-11-15T08:30:00Z", "d": "1.50", "l": [1, None]}

    def test_parquet_with_bytes(self, shell: Shell) -> None:
        """What JSON cannot carry is refused, and MessagePack takes it."""
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = arrow.Table.from_pylist([{"b": None}, {"b": b"\x00\xff"}])
        parquet.write_table(table, shell.directory / "rows.parquet")
        shell("enqueue", "import", "--from", "rows.parquet", code=2)
        assert "rows.parquet, row 2: json cannot carry bytes" in shell.err
        shell.again("--codec", "msgpack", name="rows.parquet")
        assert shell.payloads() == [{"b": None}, {"b": {"$base64": "AP8="}}]

    def test_the_format_can_be_said(self, shell: Shell) -> None:
        """Where the name does not tell, --format does, and it wins over the name."""
        shell.load("a\n1\n", "--format", "csv", name="rows.jsonl")
        assert shell.payloads() == [{"a": "1"}]
        shell("enqueue", "import", "--from", "rows.txt", code=2)
        assert "give --format" in shell.err

    def test_stdin(self, empty: Path) -> None:
        """Rows may come through a pipe, which has no name of its own: each call is a load of its own."""
        for _ in range(2):
            done = dibs("enqueue", "a", "--from", "-", "--format", "jsonl", cwd=empty, stdin="1\n2\n")
            assert (done.returncode, done.stdout.startswith("2 tasks enqueued in "), done.stderr) == (0, True, "")
        assert len(json.loads(dibs("ls", "--json", cwd=empty).stdout)["tasks"]) == 4
        once = ["enqueue", "a", "--from", "-", "--format", "jsonl", "--load", "x", "--json"]
        told = [json.loads(dibs(*once, cwd=empty, stdin="1\n2\n").stdout) for _ in range(2)]
        assert [(one["enqueued"], one["already"]) for one in told] == [(2, False), (0, True)]
        done = dibs("enqueue", "a", "--from", "-", "--format", "parquet", cwd=empty)
        assert (done.returncode, "name a file" in done.stderr) == (2, True)

    def test_no_rows(self, shell: Shell) -> None:
        """A file without rows is loaded in no time, and may get some."""
        assert shell.load("\n\n")["enqueued"] == 0
        assert shell.load("a\n", name="rows.csv")["enqueued"] == 0
        assert shell.load("1\n")["enqueued"] == 1

    def test_many_rows(self, shell: Shell) -> None:
        """More than a chunk holds, by number and by size, are enqueued in their order."""
        assert shell.load("\n".join(map(str, range(4321))))["enqueued"] == 4321
        assert shell.payloads() == list(range(4321))
        shell.load("\n".join(f'"{number}{"x" * 300_000}"' for number in range(8)), name="large.jsonl")
        assert [payload[0] for payload in shell.payloads()[4321:]] == list("01234567")

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("rows.csv", b"", "must name every field"),
            ("rows.csv", b"a,,b\n1,2,3\n", "must name every field"),
            ("rows.csv", b"a,b,a\n1,2,3\n", "Two fields of rows.csv are named 'a'"),
            ("rows.csv", b"a,\xff\n1,2\n", "is not UTF-8 text"),
            ("rows.csv", b'a,"b\n1,2\n', "is not CSV"),
            ("rows.parquet", b"", "no Parquet file that can be read"),
            ("rows.parquet", b"PAR1 and then nothing of the kind PAR1", "no Parquet file that can be read"),
            ("rows.jsonl", b'{"a": 1}\n{"a"', "rows.jsonl, line 2: not JSON (Input data was truncated)"),
            ("rows.jsonl", b'1\n\n"\xff"\n', "rows.jsonl, line 3: not JSON ('utf-8' codec"),
            ("rows.jsonl", b"[" * 100_000, "rows.jsonl, line 1: not JSON"),
            ("rows.jsonl", b"1" * (LINE_MAX_BYTES + (2 << 20)), "rows.jsonl, line 1: it is longer than"),
            ("rows.jsonl", b'1\n"' + b"x" * (1 << 20) + b'"', "line 2: the payload is 1048578 bytes"),
            ("rows.csv", b"a,b\n1,2\n3\n", "rows.csv, line 3: the header has 2 fields, and this row 1"),
            ("rows.csv", b'a,b\n"x\ny",2\n3,\xff\n', "rows.csv, line 4: it is not UTF-8 text"),
            ("rows.csv", b'a,b\n1,2\n"3,4\n', "rows.csv, line 3: not CSV"),
            ("rows.csv", b'a,"b\n1,2\n3,4"\n5,6\n', "has a quote that ends in line 3"),
            (
                "rows.csv",
                b'a,b\n1,2\n"3,\xff\n4,5"\n',
                "rows.csv, lines 3 to 4: the header has 2 fields, and this row 1",
            ),
        ],
    )
    def test_what_cannot_be_read(self, shell: Shell, name: str, content: bytes, says: str) -> None:
        """A file that is not what it should be is refused as a usage error that names file and line, and nothing is
        enqueued."""
        shell.load(content, name=name, code=2)
        (shell.directory / name).write_bytes(content)
        shell("enqueue", "import", "--from", name, code=2)
        assert says in shell.err
        assert "Traceback" not in shell.err
        shell("enqueue", "other")
        assert [task["command"] for task in shell.tasks()] == ["other"]

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("rows.jsonl", b"1\n2\n" + b"3" * 3000, "rows.jsonl, line 3: it is longer than 2,000 bytes"),
            ("rows.csv", b"a\n1\n" + b"2" * 3000, "rows.csv, line 3: this row is longer than 2,000 bytes"),
            (
                "rows.csv",
                b'a,b\n1,"\n' + b"2,3\n" * 600,
                "rows.csv, lines 2 to 501: this row is longer than 2,000 bytes",
            ),
        ],
    )
    def test_rows_without_an_end(
        self, shell: Shell, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, says: str
    ) -> None:
        """A row is read up to a limit, then the file is refused by name and line."""
        monkeypatch.setattr("dibs.cli.rows.LINE_MAX_BYTES", 2000)
        monkeypatch.setattr("dibs.cli.rows.READ_BYTES", 500)
        (shell.directory / name).write_bytes(content)
        shell("enqueue", "import", "--from", name, "--skip-bad", code=2)
        assert says in shell.err

    def test_stdin_that_is_closed(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process without stdin is told so, as a usage error."""
        monkeypatch.setattr("sys.stdin", None)
        for args in (["--from", "-", "--format", "csv"], ["--lines"], ["-"]):
            shell("enqueue", "a", *args, code=2)
            assert "Error: Stdin is closed: pipe something in, or name a file.\n" in shell.err

    def test_a_file_that_is_not_there(self, shell: Shell) -> None:
        """It is told, and no store is made."""
        shell("enqueue", "import", "--from", "rows.jsonl", code=2)
        assert "rows.jsonl cannot be read: No such file" in shell.err
        shell("enqueue", "import", "--from", ".", "--format", "csv", code=2)
        assert not (shell.directory / "dibs-data").exists()

    def test_parquet_without_pyarrow(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is told what to install."""
        monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
        shell.load("x", name="rows.parquet", code=3)
        assert "pip install 'dibs[parquet]'" in shell.err


class TestOptions:
    """What all rows have in common, and what comes from each."""

    def test_for_all(self, shell: Shell) -> None:
        """Every option of a task is one of all rows."""
        shell.load("1\n2\n", "--priority", "7", "--max-attempts", "2", "--timeout", "5m", "--delay", "1h")
        for task in shell.tasks():
            assert (task["priority"], task["max_attempts"], task["timeout_s"]) == (7, 2, 300)
            assert task["place"] == "delayed"

    def test_from_fields(self, shell: Shell) -> None:
        """Command, priority, delay and time are taken out of a row, the key stays; what a row leaves out is the
        call's."""
        rows = [
            {"sku": 1, "to": "mail", "p": 9, "in": "1h", "rest": True},
            {"sku": "b", "to": "sms", "p": "3", "at": "2027-01-31T09:30:00+01:00"},
            {"sku": "c", "to": None, "p": None, "in": 90},
        ]
        fields = ["--key-field", "sku", "--command-field", "to", "--priority-field", "p"]
        fields += ["--delay-field", "in", "--run-at-field", "at", "--priority", "5"]
        shell.load("\n".join(map(json.dumps, rows)), *fields)
        found = {task["key"]: task for task in shell.tasks()}
        assert [(found[key]["command"], found[key]["priority"]) for key in ("1", "b", "c")] == [
            ("mail", 9), ("sms", 3), ("import", 5),
        ]  # fmt: skip
        assert [found[key]["payload"] for key in ("1", "b", "c")] == [
            {"sku": 1, "rest": True},
            {"sku": "b"},
            {"sku": "c"},
        ]
        assert found["b"]["due_at"] == "2027-01-31T08:30:00.000Z"

    def test_from_columns(self, shell: Shell) -> None:
        """Texts of CSV serve as well, and a command need not be given if every row has one."""
        (shell.directory / "rows.csv").write_text("a,c,p,d\n1,mail,9,5m\n2,sms,0,0\n")
        fields = ["--command-field", "c", "--priority-field", "p", "--delay-field", "d"]
        shell("enqueue", "--from", "rows.csv", *fields)
        found = sorted((task["command"], task["priority"], task["place"], task["payload"]) for task in shell.tasks())
        assert found == [("mail", 9, "delayed", {"a": "1"}), ("sms", 0, "ready", {"a": "2"})]

    def test_limit_keys(self, shell: Shell) -> None:
        """Each row counts against the limits of its own limit_key, which stays in the payload; one without it is the
        call's."""
        shell.load(
            '{"who": "ann"}\n{"who": 7}\n{"who": "ann"}\n{}\n', "--limit-key-field", "who", "--limit-key", "rest"
        )
        assert shell.payloads() == [{"who": "ann"}, {"who": 7}, {"who": "ann"}, {}]
        shell("configure", "import", "--key-in-flight", "1")
        assert asyncio.run(claimed(shell.directory / "dibs-data")) == [b'{"who": "ann"}', b'{"who": 7}', b"{}"]

    @pytest.mark.parametrize(("value", "says"), [(1.5, "who is 1.5: use a text or whole number"), ("", "is not a key")])
    def test_bad_limit_keys(self, shell: Shell, value: object, says: str) -> None:
        """What cannot be a limit_key is told with its line."""
        shell.load(json.dumps({"who": value}), "--limit-key-field", "who", code=2)
        assert "rows.jsonl, line 1: " in shell.err
        assert says in shell.err

    def test_numbers_of_tables(self, shell: Shell) -> None:
        """Whole numbers that a table wrote as fractions, and fractions of seconds, are what they mean."""
        shell.load('{"p": 3.0, "d": 0.5}\n{"p": "4.0", "d": 3600.5}\n', "--priority-field", "p", "--delay-field", "d")
        assert sorted(task["priority"] for task in shell.tasks()) == [3, 4]

    @pytest.mark.parametrize("option", ["key", "limit-key", "command", "priority", "delay", "run-at"])
    def test_a_field_that_no_column_has(self, shell: Shell, option: str) -> None:
        """A misspelt field is refused with the columns there are, before anything is read."""
        (shell.directory / "rows.csv").write_text("sku,name\n1,a\n")
        shell("enqueue", "import", "--from", "rows.csv", f"--{option}-field", "nope", "--skip-bad", code=2)
        assert f"--{option}-field: rows.csv has no field 'nope'. It has: sku, name." in shell.err
        assert not (shell.directory / "dibs-data").exists()

    def test_a_field_that_no_column_of_parquet_has(self, shell: Shell) -> None:
        """The columns of a Parquet file are known as well."""
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist([{"n": 1, "p": 2}]), shell.directory / "rows.parquet")
        shell("enqueue", "import", "--from", "rows.parquet", "--priority-field", "nope", code=2)
        assert "rows.parquet has no field 'nope'. It has: n, p." in shell.err

    def test_a_field_that_no_row_has(self, shell: Shell) -> None:
        """JSON lines have no header: that no row has a field is told in the end, that some have none is not."""
        shell.load('{"p": 1}\n{"a": 1}\n', "--priority-field", "p", "--delay-field", "nope")
        assert shell.err == "No row has a field 'nope' for --delay-field: check the name.\n"

    @pytest.mark.parametrize(
        ("row", "says"),
        [
            ({}, "no text or whole number under 'sku'"),
            ({"sku": 1.5}, "no text or whole number under 'sku'"),
            ({"sku": "x" * 513}, "over 512 bytes"),
            ({"sku": 1, "p": 10}, "priority is 10"),
            ({"sku": 1, "p": "high"}, "p is 'high': use a whole number"),
            ({"sku": 1, "d": "soon"}, "d is 'soon'"),
            ({"sku": 1, "d": -1}, "d is -1"),
            ({"sku": 1, "at": "2027-01-31T09:30:00"}, "say which time zone"),
            ({"sku": 1, "at": 5}, "at is 5: use a time"),
            ({"sku": 1, "at": "6000-01-31T09:30:00Z"}, "at is '6000-01-31T09:30:00Z': use a time from 1970"),
            ({"sku": 1, "p": 1.5}, "p is 1.5: use a whole number"),
            ({"sku": 1, "p": True}, "p is True: use a whole number"),
            ({"sku": 1, "d": -0.5}, "d is -0.5"),
            ({"sku": 1, "d": "9000d"}, "d is '9000d': use at most 366d"),
            ({"sku": None}, "no text or whole number under 'sku'"),
            ({"sku": ""}, "use non-empty text"),
            ({"sku": 1, "d": 5, "at": "2027-01-31T09:30:00Z"}, "use one of them"),
            ({"sku": 1, "c": "no such name"}, "is not a command"),
            ({"sku": 1, "c": 5}, "c is 5: use a text"),
            ([1], "it is no object"),
        ],
    )
    def test_bad_fields(self, shell: Shell, row: Any, says: str) -> None:
        """A field that cannot be what it should be is told with its line."""
        fields = ["--key-field", "sku", "--command-field", "c", "--priority-field", "p", "--delay-field", "d"]
        content = '{"sku": 0}\n' + json.dumps(row)
        shell.load(content, *fields, "--run-at-field", "at", code=2)
        assert "rows.jsonl, line 2: " in json.loads(shell.err)["message"]
        assert says in json.loads(shell.err)["message"]

    def test_a_row_without_a_command(self, shell: Shell) -> None:
        """Without a command for all, every row needs one."""
        (shell.directory / "rows.jsonl").write_text('{"c": "mail"}\n{"c": null}\n')
        shell("enqueue", "--from", "rows.jsonl", "--command-field", "c", code=2)
        assert "line 2: it has no command under 'c'" in shell.err

    @pytest.mark.parametrize(
        "args",
        [
            ["enqueue", "--from", "rows.jsonl"],
            ["enqueue", "a", "{}", "--from", "rows.jsonl"],
            ["enqueue", "a", "--from", "rows.jsonl", "--key", "k"],
            ["enqueue", "a", "--from", "rows.jsonl", "--lines"],
            ["enqueue", "a", "--from", "rows.jsonl", "--codec", "raw"],
            ["enqueue", "a", "--from", "rows.jsonl", "--load", ""],
            ["enqueue", "a", "--from", "rows.jsonl", "--delay", "5m", "--run-at", "2027-01-31T09:30:00Z"],
            ["enqueue", "a b", "--from", "rows.jsonl"],
            ["enqueue", "a", "--load", "x"],
            ["enqueue", "a", "--skip-bad"],
            ["enqueue", "a", "--priority-field", "p"],
            ["enqueue", "a", "--lines", "--command-field", "p"],
            ["enqueue", "a", "--lines", "--limit-key-field", "p"],
            ["enqueue", "a", "--from", "rows.jsonl", "--delay-field", "p", "--priority-field", "p"],
            ["enqueue"],
        ],
        ids=" ".join,
    )
    def test_what_does_not_go_together(self, shell: Shell, args: list[str]) -> None:
        """Options that contradict each other are a usage error, and nothing is enqueued."""
        (shell.directory / "rows.jsonl").write_text("1\n")
        shell(*args, code=2)
        assert shell.err.startswith("Error: ")
        assert "line 1" not in shell.err
        shell("enqueue", "other")
        assert len(shell.tasks()) == 1

    def test_keys_are_decided_when_a_row_is_reached(self, shell: Shell) -> None:
        """Of rows with one key the first is the task; the others end as duplicates and run never."""
        shell.load('{"sku": 1}\n{"sku": 2}\n{"sku": 1}\n', "--key-field", "sku")
        assert len(shell.tasks()) == 3


class TestBadRows:
    """--skip-bad."""

    def test_they_are_set_aside(self, shell: Shell) -> None:
        """The good ones are loaded; the bad ones stand in a file with number and reason, and the exit code says so."""
        lines = ["1", "nope", *map(str, range(2, 2000)), '{"a":', "2000"]
        told = shell.load("\n".join(lines), "--skip-bad", code=1)
        assert (told["enqueued"], told["set_aside"], told["set_aside_in"]) == (2000, 2, "rows.jsonl.bad.jsonl")
        assert shell.payloads() == list(range(1, 2001))
        assert [(bad["line"], bad["row"]) for bad in shell.bad()] == [(2, "nope"), (2001, '{"a":')]
        assert "not JSON" in shell.bad()[0]["error"]

    def test_they_are_told(self, shell: Shell) -> None:
        """How many there are and where is said on stderr."""
        (shell.directory / "rows.csv").write_bytes(b'a,b\n1\n"x"y,2\n\xff,2\n3,4\n')
        assert shell("enqueue", "import", "--from", "rows.csv", "--skip-bad", code=1).startswith("1 task enqueued in ")
        assert shell.err == "3 lines set aside in rows.csv.bad.jsonl, with the reasons.\n"
        assert [(bad["line"], bad["row"]) for bad in shell.bad("rows.csv")] == [
            (2, ["1"]), (3, '"x"y,2\n'), (4, ["\\xff", "2"]),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("bad", "where", "opens"),
        [
            ('7,"x', "lines 3 to 103: not CSV", 3),
            ('"7,x', "lines 3 to 103: not CSV", 3),
            ('"7\n7","x', "lines 3 to 104: not CSV", 4),
            ('7,"x\n8,y\n9,"z', "lines 3 to 5: not CSV", 3),
            ('"7,x\n8,y\n9,z"', "lines 3 to 5: the header has 2 fields, and this row 1", 3),
            ('"7"7,"x', "line 3: not CSV", 3),
        ],
    )
    def test_a_stray_quote(self, shell: Shell, bad: str, where: str, opens: int) -> None:
        """A quote that takes other rows into its value refuses the file, also with --skip-bad: nothing vanishes."""
        (shell.directory / "rows.csv").write_text(f"a,b\n1,2\n{bad}\n" + "3,4\n" * 100)
        for args in ([], ["--skip-bad"]):
            shell("enqueue", "import", "--from", "rows.csv", *args, code=2)
            assert f"rows.csv, {where}" in shell.err
            assert f"the quote that opens in line {opens}\nNothing was enqueued." in shell.err
        assert shell.payloads() == []

    def test_a_quote_that_harms_nobody(self, shell: Shell) -> None:
        """What is wrong within its own line is set aside, and rows over several lines that fit are loaded."""
        rows = 'a,b\n"x"y,"2"\n5,6" wide\n"7\n7","""8""\n8"\n9,"9",9\n'
        assert shell.load(rows, "--skip-bad", name="rows.csv", code=1)["set_aside"] == 2
        assert [(bad["line"], bad["row"]) for bad in shell.bad("rows.csv")] == [
            (2, '"x"y,"2"\n'), (7, ["9", "9", "9"]),
        ]  # fmt: skip
        assert shell.payloads() == [{"a": "5", "b": '6" wide'}, {"a": "7\n7", "b": '"8"\n8'}]

    def test_all_of_them(self, shell: Shell) -> None:
        """Where nothing is left, nothing is loaded."""
        assert shell.load("x\ny\n", "--skip-bad", code=1)["enqueued"] == 0

    def test_none_of_them(self, shell: Shell) -> None:
        """Without bad rows there is no such file."""
        shell.load("1\n", "--skip-bad")
        assert not (shell.directory / "rows.jsonl.bad.jsonl").exists()

    def test_the_file_cannot_be_written(self, shell: Shell) -> None:
        """Then nothing is enqueued."""
        (shell.directory / "rows.jsonl.bad.jsonl").mkdir()
        shell.load("1\nx\n", "--skip-bad", code=2)
        assert "rows.jsonl.bad.jsonl cannot be written" in shell.err


class TestOnce:
    """What happens to a load that is repeated."""

    def test_the_same_file_again(self, shell: Shell) -> None:
        """An unchanged file is loaded once by the same call; another call, or a changed file, is another load."""
        rows = "\n".join(map(str, range(2500)))
        first = shell.load(rows)
        second = shell.again()
        assert (second["load"], second["enqueued"], second["already"]) == (first["load"], 0, True)
        assert shell("enqueue", "import", "--from", "./rows.jsonl").startswith("Already loaded, nothing enqueued.")
        assert len(shell.payloads()) == 2500
        assert shell.again("--priority", "3")["enqueued"] == 2500
        os.utime(shell.directory / "rows.jsonl", ns=(1, 1))
        assert shell.again()["enqueued"] == 2500

    def test_under_a_name(self, shell: Shell) -> None:
        """A name is loaded once, whatever the file; another name loads the same file again."""
        assert shell.load("1\n2\n", "--load", "monday")["load"] == "monday"
        told = shell.load("1\n2\n3\n", "--load", "monday")
        assert (told["enqueued"], told["already"]) == (0, True)
        assert shell.again("--load", "tuesday")["enqueued"] == 3
        assert len(shell.payloads()) == 5

    def test_tenants_have_names_of_their_own(self, shell: Shell) -> None:
        """What one tenant loaded, another can load under the same name."""
        assert shell.load("1\n", "--load", "x", "--tenant", "acme")["enqueued"] == 1
        assert shell.again("--load", "x")["enqueued"] == 1

    def test_after_a_refusal(self, shell: Shell) -> None:
        """A load that was refused is no hindrance: corrected, it is loaded under the same name."""
        shell.load("1\n" * 2500 + "x", "--load", "monday", code=2)
        assert shell.load("1\n" * 1500, "--load", "monday")["enqueued"] == 1500

    def test_quietly(self, shell: Shell) -> None:
        """--quiet prints nothing, also with --json."""
        (shell.directory / "rows.jsonl").write_text("1\n")
        assert shell("enqueue", "import", "--from", "rows.jsonl", "-q") == ""
        assert shell("enqueue", "import", "--from", "rows.jsonl", "-q", "--json") == ""
        assert shell.err == ""


def test_killed_half_way(empty: Path) -> None:
    """kill -9 while rows are being staged leaves nothing that is visible; the same call again loads each row once."""
    rows = "".join(f"{number}\n" for number in range(5_000))
    args = ["enqueue", "a", "--from", "pipe", "--format", "jsonl", "--load", "import"]
    os.mkfifo(empty / "pipe")
    dibs("enqueue", "other", cwd=empty)
    with started(*args, cwd=empty) as process, (empty / "pipe").open("w") as pipe:
        # More than a pipe holds: when the last of it is written, the first of it has been staged.
        pipe.write(rows + " \n" * 200_000)
        pipe.flush()
        os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
    assert asyncio.run(staged(shutil.copytree(empty / "dibs-data", empty / "copy"), "import")) >= 1
    assert len(json.loads(dibs("ls", "--all", "--json", cwd=empty).stdout)["tasks"]) == 1
    (empty / "pipe").unlink()
    (empty / "pipe").write_text(rows)
    for enqueued in (5_000, 0):
        assert json.loads(dibs(*args, "--json", cwd=empty).stdout)["enqueued"] == enqueued
    found = json.loads(dibs("ls", "-c", "a", "--all", "--json", cwd=empty).stdout)["tasks"]
    assert sorted(task["payload"] for task in found) == list(range(5_000))
    assert dibs("doctor", cwd=empty).returncode == 0


async def staged(directory: Path, name: str) -> int:
    """How many chunks of a load wait for their commit; they are dropped."""
    async with await open_store(directory) as store:
        return await store.drop("default", [chunk_id_of("default", name, number) for number in range(5)])


def test_interrupted_half_way(empty: Path) -> None:
    """Ctrl-C while rows are awaited ends it at once with 130, says that nothing was enqueued, and it is so."""
    with started("enqueue", "a", "--from", "-", "--format", "jsonl", cwd=empty) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"1\n" * 300_000)
        process.stdin.flush()
        wait_until_it_waits(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr.read() == b"Interrupted: nothing was enqueued.\n"
    assert json.loads(dibs("ls", "--json", cwd=empty).stdout)["tasks"] == []
    assert dibs("doctor", cwd=empty).returncode == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [(["--from", "rows.jsonl"], "Run the same call again"), (["--from", "-", "--format", "jsonl"], "`dibs queues`")],
)
def test_interrupted_in_the_commit(shell: Shell, monkeypatch: pytest.MonkeyPatch, args: list[str], says: str) -> None:
    """Ctrl-C while the commit is on its way says that it may have been too late, and how to find out."""
    (shell.directory / "rows.jsonl").write_text("1\n2\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"1\n2\n")))
    commit = Load.commit

    async def interrupted(self: Load) -> None:
        await commit(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Load, "commit", interrupted)
    shell("enqueue", "import", *args, code=130)
    assert shell.err.startswith("Interrupted while it was being committed: all of it is enqueued, or nothing. ")
    assert says in shell.err
    assert shell.payloads() == [1, 2]


async def claimed(directory: Path) -> list[bytes]:
    """The payloads of what can be claimed now."""
    async with await open_store(directory) as store:
        return [lease.payload for lease in await store.claim("default", ["import"], limit=10, lease_s=60)]


def wait_until_it_waits(process: subprocess.Popen[bytes]) -> None:
    """Until all that was written to it is read, and it sleeps."""
    assert process.stdin is not None
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        unread = struct.unpack("i", fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4)))[0]
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if unread == 0 and state == "S":
            return
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_changed_while_it_is_read(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that somebody still writes to is not loaded."""
    path = shell.directory / "rows.jsonl"
    path.write_text("1\n" * 1500)
    stage = Load.stage

    async def writing(self: Load, rows: Any) -> bytes:
        with path.open("a") as file:
            file.write("2\n")
        return await stage(self, rows)

    monkeypatch.setattr(Load, "stage", writing)
    shell("enqueue", "import", "--from", "rows.jsonl", code=2)
    assert "was changed while it was read: nothing was enqueued" in shell.err
    assert shell.payloads() == []


def test_on_a_terminal(empty: Path) -> None:
    """A person sees how far it is; what is left on the screen is the summary."""
    (empty / "rows.jsonl").write_text("1\n" * 3000)
    with on_terminal("enqueue", "a", "--from", "rows.jsonl", cwd=empty) as terminal:
        code, text = terminal.finish()
    assert code == 0
    assert "3,000 tasks enqueued in " in text
    assert "rows/s" in text
