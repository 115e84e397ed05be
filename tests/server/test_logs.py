"""A log line is one line, says nothing that a caller made up, and gives no token away."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dibs.server.telemetry import logs
from dibs.server.telemetry.logs import Format, access, escape, mask, setup

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhY21lIn0.c2lnbmF0dXJlLW9mLWl0"
LEASE_HEX = "00000000000012ab9f3c5d7e8a6b4c2d"
LEASE_BASE64 = "AAAAAAAAEqufPF1-imtMLQ=="
STATIC = "dibs_Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6cXV4Zm9vYmFyYmE"
HOSTILE = [
    "line\nbreak",
    "carriage\rreturn",
    "\x1b[31mred\x1b[0m",
    "\x00\x07\x08\x7f",
    "\u202egnp.exe",
    "\u2066isolate\u2069",
    "\u2028separator\u2029",
    "\u200bzero width",
    "lone \ud800 surrogate",
    "\u0085next line",
    'quote" and \\ backslash',
]

Lines = Callable[[], list[str]]


@pytest.fixture(params=logs.FORMATS)
def form(request: pytest.FixtureRequest) -> Format:
    """Both forms of a line."""
    given: Format = request.param
    return given


@pytest.fixture
def lines(form: Format) -> Iterator[Lines]:
    """What was logged so far, through the real thing."""
    stream = io.StringIO()
    before = {name: logging.getLogger(name).level for name in ("dibs", "uvicorn")}
    setup(form, "INFO", stream)
    yield lambda: stream.getvalue().splitlines()
    root = logging.getLogger()
    root.handlers[:] = [handler for handler in root.handlers if not isinstance(handler, logs._LineHandler)]
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """What is logged meanwhile is not for pytest's report, which cannot be made of everything."""
    root = logging.getLogger()
    others = [handler for handler in root.handlers if not isinstance(handler, logs._LineHandler)]
    for handler in others:
        root.removeHandler(handler)
    yield
    for handler in others:
        root.addHandler(handler)


def request(**changes: Any) -> None:
    """Logs a request."""
    fields: dict[str, Any] = {
        "request_id": "0195-ab",
        "client": "192.0.2.7",
        "method": "POST",
        "route": "/v1/tasks/{id}/result",
        "status": 202,
        "duration_s": 0.0123456,
        "size_bytes": 17,
        "tenant": "acme",
        "subject": "worker 7",
    }
    access(**(fields | changes))


def test_a_request_is_one_line_with_its_fields(lines: Lines, form: Format) -> None:
    """Time, level, id, address of the client, method, route, status, duration, bytes, tenant, subject."""
    request()
    [line] = lines()
    if form == "text":
        assert re.fullmatch(
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO dibs\.access request id=0195-ab client=192\.0\.2\.7 "
            r"method=POST route=/v1/tasks/{id}/result status=202 duration_ms=12\.346 bytes=17 tenant=acme "
            r'subject="worker 7"',
            line,
        )
    else:
        seen = json.loads(line)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", seen.pop("time"))
        assert seen == {
            "level": "INFO", "logger": "dibs.access", "message": "request", "id": "0195-ab",
            "client": "192.0.2.7", "method": "POST", "route": "/v1/tasks/{id}/result", "status": 202,
            "duration_ms": 12.346, "bytes": 17, "tenant": "acme", "subject": "worker 7",
        }  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_what_callers_send_is_escaped(lines: Lines, form: Format, text: str) -> None:
    """In messages, arguments, fields and errors: always one line of printable characters."""
    with unheard():
        log = logging.getLogger("dibs.server")
        log.warning("the name is %s", text)
        log.warning("the name is " + text.replace("%", "%%"))  # noqa: G003 as a careless caller would
        request(subject=text, request_id=text)
        try:
            raise ValueError(text)
        except ValueError:
            log.exception("it failed for %r", text)
    seen = lines()
    assert len(seen) == 4
    for line in seen:
        assert line.isprintable()
        if form == "json":
            texts = [text for name, text in json.loads(line).items() if isinstance(text, str) and name != "traceback"]
            assert all(text.isprintable() for text in texts)


def test_a_forged_line_does_not_pass_for_one(lines: Lines, form: Format) -> None:
    """What looks like another line, or another field, stays inside its own."""
    request(subject='x" status=500\n2026-01-01T00:00:00.000Z ERROR dibs.server forged')
    [line] = lines()
    if form == "json":
        assert json.loads(line)["status"] == 202
    else:
        assert '\\" status=500' in line


@pytest.mark.parametrize("secret", [JWT, LEASE_HEX, LEASE_HEX.upper(), LEASE_BASE64, STATIC])
def test_tokens_are_masked_wherever_they_stand(lines: Lines, secret: str) -> None:
    """In messages, arguments of any kind, fields and errors."""
    log = logging.getLogger("dibs.server")
    log.info("it came with %s, really", secret)
    log.info("headers %r", {"authorization": f"Bearer {secret}", "x-lease-token": secret})
    log.info("headers %r", [(b"authorization", f"Bearer {secret}".encode())])
    log.info("asked http://%s@queue.example:8080/v1", secret)
    log.info("asked https://user:%s@queue.example/", secret)
    log.info("?token=%s&x=1", secret)
    request(subject=secret)
    try:
        raise ValueError(f"bad token {secret}") from KeyError(secret)
    except ValueError:
        log.exception("no")
    told = "\n".join(lines())
    assert secret not in told
    assert told.count("***") >= 9
    assert "queue.example:8080/v1" in told


@pytest.mark.parametrize(
    "text", ["Bearer abc\ndef.ghi", "token=abc\u202edef", "Authorization: Bearer s3cr3t\x00tail"], ids=ascii
)
def test_a_break_inside_a_token_saves_nothing_of_it(lines: Lines, text: str) -> None:
    """It is escaped before it is looked for."""
    logging.getLogger("dibs.server").info("got %s", text)
    [line] = lines()
    assert not re.search("def|ghi|tail|s3cr3t", line)


@pytest.mark.parametrize("part", ["token", "a.", "eyJaaaaa-", "a://", "bearer ", "token  ", "x" * 22, "dibs_a-", "://"])
def test_a_line_made_to_be_slow_is_searched_like_any(part: str) -> None:
    """Millions of such characters a second, where looking from each to the end would take hours."""
    for _ in range(20):
        mask(part * (logs.LINE_MAX_CHARS // len(part)))


def test_ids_stay_readable(lines: Lines) -> None:
    """Task ids, trace contexts, request ids, routes and metric names are no tokens."""
    for text in (
        "task 0195c2a4-7e1b-7a3c-9d2e-0123456789ab",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "dibs_journal_reader_lag_seconds",
        "the secret is out",
        "tokens",
    ):
        assert mask(text) == text
    request(request_id=LEASE_HEX)
    assert LEASE_HEX in lines()[0]


def test_text_in_any_script_stays_readable() -> None:
    """What can be printed is printed."""
    assert escape("grüße, 世界, שלום") == "grüße, 世界, שלום"
    assert escape("a\tb\u202ec\U000e0001") == "a\\tb\\u202ec\\U000e0001"


def test_a_traceback_is_part_of_its_line(lines: Lines, form: Format) -> None:
    """As text its breaks are escaped, in JSON they are breaks again once it is read."""
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("dibs.server").exception("request %s failed", "abc")
    [line] = lines()
    assert "boom" in line
    if form == "json":
        assert json.loads(line)["traceback"].split("\n")[-1] == "ValueError: boom"


def test_levels_and_loggers(lines: Lines) -> None:
    """Ours from the level on, others from warnings on, and nothing of uvicorn's access log."""
    logging.getLogger("dibs.server").debug("hidden")
    logging.getLogger("dibs.server").info("shown")
    logging.getLogger("uvicorn.error").info("shown")
    logging.getLogger("uvicorn.access").error('127.0.0.1 - "GET /raw/path" 200')
    logging.getLogger("some.library").info("hidden")
    logging.getLogger("some.library").warning("shown")
    assert [len(re.findall("shown", line)) for line in lines()] == [1, 1, 1]


def test_what_cannot_be_formatted_is_still_one_line(lines: Lines) -> None:
    """Arguments that do not fit, objects that raise, and lines without end."""

    class Rude:
        def __str__(self) -> str:
            raise RuntimeError("no")

    log = logging.getLogger("dibs.server")
    with unheard():
        log.info("two %s %s", "one")  # noqa: PLE1206 as a careless caller would
        log.info("rude %s", Rude())
        log.info("x" * 1_000_000)
    assert len(lines()) == 3
    assert max(map(len, lines())) < 20_000


def test_set_up_again_it_replaces_itself(lines: Lines, form: Format) -> None:
    """One line for each event, however often."""
    second = io.StringIO()
    setup(form, "WARNING", second)
    logging.getLogger("dibs.server").warning("once")
    logging.getLogger("dibs.server").info("not heard")
    request()
    assert lines() == []
    assert len(second.getvalue().splitlines()) == 1
