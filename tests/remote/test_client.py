from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dibs.app import Dibs
from dibs.errors import (
    DibsError,
    Forbidden,
    LimitExceeded,
    PayloadTooLarge,
    StoreClosed,
    StoreRefused,
    StoreUnavailable,
    Unauthenticated,
    UnknownScheme,
)
from dibs.ids import new_id
from dibs.server.app import Service, open_service
from dibs.server.auth import Scope
from dibs.server.config import ServerConfig
from dibs.server.http.listener import bind
from dibs.server.verifiers.keys import KeyConfig
from dibs.server.verifiers.tokens import StaticToken, add_token, hash_of, new_token
from dibs.settings import Settings, mask
from dibs.stores import open_store
from dibs.stores.protocol import Order, Store
from dibs.stores.remote.address import Address
from dibs.stores.remote.verbs import About
from dibs.stores.wakeups import Ready
from dibs.task import (
    Acted,
    Already,
    Cancelled,
    Enqueued,
    ErrorInfo,
    Extended,
    Filter,
    Heartbeat,
    Kind,
    Lease,
    NewTask,
    QueueConfig,
    Settled,
    Settlement,
    Status,
    WorkerInfo,
)
from tests.remote.proxy import MOMENTS, Moment, Proxy, answer, impostor, proxied
from tests.server.issuer import AUDIENCE, ISSUER, claims, hs256
from tests.server.issuer import SECRET as SIGNING
from tests.server.running import free_port

TENANT = "default"
SECRET = "s3cr3t"
ABOUT = answer(200, msgspec.msgpack.encode(About(Order(), 1 << 20, 1 << 20)), content_type="application/msgpack")


class Between:
    """A server, a proxy before it, a client that goes through the proxy and one that does not."""

    def __init__(self, service: Service, proxy: Proxy, store: Store, direct: Store) -> None:
        self.service = service
        self.proxy = proxy
        self.store = store
        self.direct = direct

    async def leased(self, **options: object) -> Lease:
        """A task that was enqueued and claimed."""
        await self.direct.enqueue(TENANT, [NewTask(command="a", **options)])  # type: ignore[arg-type]
        [lease] = await self.direct.claim(TENANT, ["a"])
        return lease

    async def status(self, task_id: bytes) -> Status | None:
        """How a task stands."""
        [task] = await self.direct.get(TENANT, [task_id])
        return None if task is None else task.status


async def started(tmp_path: Path, config: ServerConfig, host: str = "127.0.0.1") -> tuple[Service, int]:
    """A server over memory, and its port."""
    service = await open_service(config, Settings(url=f"memory:{tmp_path}"))
    bound = bind(host, 0)
    port: int = bound.getsockname()[1]
    await service.start(bound)
    return service, port


@pytest.fixture
async def between(tmp_path: Path) -> AsyncIterator[Between]:
    """The four of them."""
    service, port = await started(tmp_path, ServerConfig(stop_within_s=1.0))
    async with (
        proxied(port) as proxy,
        await open_store(proxy.url) as store,
        await open_store(f"http://127.0.0.1:{port}") as direct,
    ):
        yield Between(service, proxy, store, direct)
    await service.stop()


# ------------------------------------------------------------------------------------------------------ lost answers


@pytest.fixture(params=[*MOMENTS, "all"])
def moments(request: pytest.FixtureRequest) -> tuple[Moment, ...]:
    """When the connection is cut; `all`: at each of these moments in turn."""
    return MOMENTS if request.param == "all" else (request.param,)


def settlement(lease: Lease, kind: Kind = Kind.COMPLETE) -> Settlement:
    """Ends a lease."""
    error = ErrorInfo("Boom") if kind is Kind.FAIL else None
    return Settlement(tenant=TENANT, id=lease.id, token=lease.token, kind=kind, error=error)


class TestLostAnswers:
    """A call whose connection is cut is repeated by itself, and does once what it was asked."""

    async def test_enqueue(self, between: Between, moments: tuple[Moment, ...]) -> None:
        """There is one task of each, and those whose ids the client minted are new to the caller."""
        between.proxy.trouble("enqueue", *moments)
        mine = new_id()
        first, second, third = await between.store.enqueue(
            TENANT, [NewTask(command="a"), NewTask(command="a", id=mine), NewTask(command="a", key="k")]
        )
        assert between.proxy.cuts == len(moments)
        assert isinstance(first, Enqueued)
        assert not first.already
        assert isinstance(second, Enqueued)
        assert second.id == mine
        assert isinstance(third, Enqueued)
        assert not third.already
        assert (await between.direct.stats(TENANT)).total.ready == 3

    @pytest.mark.parametrize("wait_s", [0.0, 10.0])
    async def test_claim(self, between: Between, moments: tuple[Moment, ...], wait_s: float) -> None:
        """A claim takes what it says it took, and no more."""
        await between.direct.enqueue(TENANT, [NewTask(command="a") for _ in range(9)])
        between.proxy.trouble("claim", *moments)
        leases = await between.store.claim(TENANT, ["a"], limit=2, wait_s=wait_s)
        assert (len(leases), between.proxy.cuts) == (2, len(moments))
        total = (await between.direct.stats(TENANT)).total
        assert (total.ready, total.leased) == (7, 2)
        assert await between.store.settle([settlement(lease) for lease in leases]) == [Settled(Status.COMPLETED)] * 2

    async def test_unclaim(self, between: Between, moments: tuple[Moment, ...]) -> None:
        """What was claimed is back once."""
        claim_id = new_id()
        await between.direct.enqueue(TENANT, [NewTask(command="a")])
        await between.direct.claim(TENANT, ["a"], claim_id=claim_id)
        between.proxy.trouble("unclaim", *moments)
        assert await between.store.unclaim(TENANT, claim_id) in (0, 1)
        assert (await between.direct.stats(TENANT)).total.ready == 1

    async def test_heartbeat(self, between: Between, moments: tuple[Moment, ...]) -> None:
        """The lease is extended."""
        lease = await between.leased()
        between.proxy.trouble("heartbeat", *moments)
        [beat] = await between.store.heartbeat(
            [Heartbeat(tenant=TENANT, id=lease.id, token=lease.token, extend_s=3600.0)]
        )
        assert isinstance(beat, Extended)
        assert beat.lease_end_ms > lease.lease_end_ms

    @pytest.mark.parametrize("kind", Kind)
    async def test_settle(self, between: Between, moments: tuple[Moment, ...], kind: Kind) -> None:
        """The settlement stands, and its caller is told so, at the latest by `Already`."""
        lease = await between.leased()
        between.proxy.trouble("settle", *moments)
        [settled] = await between.store.settle([settlement(lease, kind)])
        assert isinstance(settled, Settled | Already)
        assert isinstance(settled, Settled) or moments != ("before",)
        ends = {Kind.COMPLETE: Status.COMPLETED, Kind.FAIL: Status.FAILED}
        assert await between.status(lease.id) == ends.get(kind, Status.PENDING)

    async def test_cancel(self, between: Between, moments: tuple[Moment, ...]) -> None:
        """The task is cancelled."""
        [outcome] = await between.direct.enqueue(TENANT, [NewTask(command="a")])
        assert isinstance(outcome, Enqueued)
        between.proxy.trouble("cancel", *moments)
        [cancelled] = await between.store.cancel(TENANT, [outcome.id])
        assert isinstance(cancelled, Cancelled)
        assert cancelled.status is Status.CANCELLED
        assert await between.status(outcome.id) is Status.CANCELLED

    @pytest.mark.parametrize("by", ["id", "filter"])
    async def test_replay_and_purge(self, between: Between, moments: tuple[Moment, ...], by: str) -> None:
        """Dead letters are revived once, and removed once."""
        lease = await between.leased()
        which = [lease.id] if by == "id" else Filter(command="a")
        await between.direct.settle([settlement(lease, Kind.FAIL)])
        between.proxy.trouble("replay", *moments)
        assert isinstance(await between.store.replay(TENANT, which), Acted)
        assert await between.status(lease.id) is Status.PENDING
        [again] = await between.direct.claim(TENANT, ["a"])
        await between.direct.settle([settlement(again, Kind.FAIL)])
        between.proxy.trouble("purge", *moments)
        assert isinstance(await between.store.purge(TENANT, which), Acted)
        assert await between.status(lease.id) is None

    async def test_loads(self, between: Between, moments: tuple[Moment, ...]) -> None:
        """The rows of a load are there once."""
        chunk, other = new_id(), new_id()
        for verb in ("stage", "commit_load", "drop"):
            between.proxy.trouble(verb, *moments)
        assert (await between.store.stage(TENANT, chunk, [NewTask(command="a")] * 3)).rows == 3
        assert not (await between.store.stage(TENANT, other, [NewTask(command="a")])).already
        committed = await between.store.commit_load(TENANT, "load", 1, [chunk])
        assert (committed.rows, committed.already) in ((3, False), (0, True))
        assert await between.store.drop(TENANT, [other]) in (0, 1)
        assert (await between.direct.stats(TENANT)).total.ready == 3
        assert await between.direct.drop(TENANT, [other]) == 0

    async def test_the_rest(self, between: Between, moments: tuple[Moment, ...]) -> None:
        """What is harmless by nature is as harmless."""
        lease = await between.leased()
        await between.direct.settle([settlement(lease)])
        for verb in ("configure", "register", "retain", "advance", "sweep", "get", "list", "stats", "workers", "wait"):
            between.proxy.trouble(verb, *moments)
        config = QueueConfig(max_attempts=7)
        assert await between.store.configure(TENANT, "a", config) == config
        await between.store.register(TENANT, WorkerInfo(name="w"), 60.0)
        assert [one.name for one in await between.store.workers(TENANT)] == ["w"]
        assert (await between.store.retain(TENANT, [lease.id], 3600.0))[0] is not None
        [bounds] = await between.store.journal_bounds()
        await between.store.advance("r", bounds.shard, bounds.newest)
        await between.store.sweep()
        [task] = await between.store.get(TENANT, [lease.id])
        assert task is not None
        assert [one.id for one in (await between.store.list(TENANT)).tasks] == [lease.id]
        assert (await between.store.stats(TENANT)).total.ready == 0
        [ended] = await between.store.wait(TENANT, [lease.id], 5.0)
        assert ended is not None
        assert between.proxy.cuts == 10 * len(moments)


async def test_a_claim_that_waits_and_is_cut(between: Between) -> None:
    """A claim that is lost by the server, and cut off when it is repeated, goes on waiting, and is given one task."""
    claiming = asyncio.ensure_future(between.store.claim(TENANT, ["late"], wait_s=30.0))
    await _until_asked(between.proxy, "claim", 1)
    between.proxy.trouble("claim", "before", "before")
    for task in [*between.service.gate._waiting]:
        task.cancel()  # as if the server had lost it
    await _until_asked(between.proxy, "claim", 3)
    await between.direct.enqueue(TENANT, [NewTask(command="late") for _ in range(3)])
    assert len(await claiming) == 1
    assert (await between.direct.stats(TENANT)).total.leased == 1


@pytest.mark.parametrize("moments", [(), ("after",), ("within", "before")])
async def test_a_claim_that_is_cancelled(between: Between, moments: tuple[Moment, ...]) -> None:
    """What a cancelled claim had taken, or takes later, is given back before anything else is asked."""
    between.proxy.trouble("claim", *moments)
    claiming = asyncio.ensure_future(between.store.claim(TENANT, ["a"], wait_s=30.0))
    await _until_asked(between.proxy, "claim", 1)
    enqueuing = asyncio.ensure_future(between.direct.enqueue(TENANT, [NewTask(command="a")]))
    await asyncio.sleep(0)
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    await enqueuing
    [lease] = await between.store.claim(TENANT, ["a"], wait_s=10.0)
    assert lease.attempt == 1
    assert (await between.direct.stats(TENANT)).total.leased == 1


async def _until_asked(proxy: Proxy, verb: str, times: int) -> None:
    async with asyncio.timeout(20):
        while proxy.asked.count(verb) < times:  # noqa: ASYNC110 - nobody tells when
            await asyncio.sleep(0.005)


async def test_wake_ups_through_a_cut(between: Between) -> None:
    """Somebody who listens hears of what happened, also if the connection was cut while it did."""
    with between.store.subscribe([Ready(TENANT, "a")]) as subscription:
        await between.store.stats(TENANT)  # now the server listens
        await between.direct.enqueue(TENANT, [NewTask(command="a")])
        assert await subscription.wait(10.0)
        between.proxy.trouble("subscribe", "within", "before")
        await between.store.stats(TENANT)
        await between.direct.enqueue(TENANT, [NewTask(command="a")])
        assert await subscription.wait(10.0)


# ------------------------------------------------------------------------------------------------- closing, giving up


async def test_close(between: Between) -> None:
    """A closed store sends those who wait away, lets others finish, and says what it is from then on."""
    store = await open_store(between.proxy.url)
    waiting = asyncio.ensure_future(store.claim(TENANT, ["a"], wait_s=30.0))
    await _until_asked(between.proxy, "claim", 1)
    enqueuing = asyncio.ensure_future(store.enqueue(TENANT, [NewTask(command="b")]))
    await _until_asked(between.proxy, "enqueue", 1)
    with store.subscribe([Ready(TENANT, "c")]) as subscription:
        await store.close()
        await store.close()
        with pytest.raises(StoreClosed):
            await waiting
        assert isinstance((await enqueuing)[0], Enqueued)
        with pytest.raises(StoreClosed):
            await store.stats(TENANT)
        assert await subscription.wait(10.0)
    assert (await between.direct.stats(TENANT)).total.leased == 0


async def test_giving_up(between: Between) -> None:
    """Nobody there: `StoreUnavailable` that names the server, after the time that the URL says."""
    always: list[Moment] = ["before"] * 1000
    async with await open_store(f"{between.proxy.url}?give_up_s=0.2") as store:
        between.proxy.trouble("stats", *always)
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{between.proxy.port} does not answer"):
            await store.stats(TENANT)
        assert 1 < between.proxy.cuts < 1000
        between.proxy.trouble("stats")
        assert (await store.stats(TENANT)).total.ready == 0
    with pytest.raises(StoreUnavailable, match="does not answer"):
        await open_store("http://127.0.0.1:1?give_up_s=0")


async def test_a_server_that_goes_and_comes(tmp_path: Path) -> None:
    """Claims that wait, and calls, outlive a restart of the server at the same address."""
    config = ServerConfig(stop_within_s=1.0)
    service, port = await started(tmp_path, config)
    async with await open_store(f"http://127.0.0.1:{port}?give_up_s=30") as store:
        claiming = [asyncio.ensure_future(store.claim(TENANT, ["a"], wait_s=30.0)) for _ in range(5)]
        while len(service.gate._waiting) < 5:  # noqa: ASYNC110 - nobody tells when
            await asyncio.sleep(0.005)
        await service.stop()
        async with asyncio.TaskGroup() as group:
            group.create_task(store.enqueue(TENANT, [NewTask(command="a") for _ in range(5)]))
            await asyncio.sleep(0)
            service = await open_service(config, Settings(url=f"memory:{tmp_path}"))
            await service.start(bind("127.0.0.1", port))
        leases = [lease for [lease] in await asyncio.gather(*claiming)]
        assert len({lease.id for lease in leases}) == 5
    await service.stop()


# -------------------------------------------------------------------------------------------------- what is no server


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///path",
        "http://:8080",
        "http://host:port",
        "http://host:99999",
        "http://[::1",
        f"http://user:{SECRET}@host",
        f"http://:{SECRET}@host",
        f"http://{SECRET}@",
        f"http://{SECRET}%0d%0aX-Evil:%201@host",
        f"http://{SECRET}%20{SECRET}@host",
        f"http://{SECRET}%ff@host",
        f"http://{SECRET}@host?give_up_s=soon",
        f"http://{SECRET}@host?give_up_s=nan",
        f"http://{SECRET}@host?give_up_s=-1",
        f"http://{SECRET}@host?color=red",
        f"https://{SECRET}@host#part",
    ],
)
async def test_urls_that_name_no_server(url: str) -> None:
    """What is no server's URL is refused without asking anybody, and without repeating the token."""
    with pytest.raises(UnknownScheme) as raised:
        await open_store(url)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (answer(200, b"<html>It works!</html>", content_type="text/html"), StoreRefused, "does not answer as a dibs"),
        (answer(404, b"<html>Not found</html>", content_type="text/html"), StoreRefused, "is no dibs server.*HTTP 404"),
        (answer(404, b'{"detail": "Not Found"}'), StoreRefused, "is no dibs server.*HTTP 404"),
        (answer(404, b'["x"]'), StoreRefused, "is no dibs server"),
        (answer(302, b"", "Location: http://127.0.0.1:1/"), StoreRefused, "is no dibs server.*HTTP 302"),
        (answer(307, b"", "Location: http://127.0.0.1:1/"), StoreRefused, "is no dibs server.*HTTP 307"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", StoreRefused, "127.0.0.1"),
        (answer(200, b""), StoreRefused, "does not answer as a dibs"),
        (answer(503, b"<html>busy</html>", content_type="text/html"), StoreUnavailable, "HTTP 503"),
        (answer(502, b""), StoreUnavailable, "HTTP 502"),
        (b"", StoreUnavailable, "does not answer"),
    ],
)
async def test_what_is_no_dibs_server(said: bytes, error: type[DibsError], message: str) -> None:
    """Something else that listens there is told from a server that is away."""
    async with impostor(said) as other:
        with pytest.raises(error, match=message) as raised:
            await open_store(f"http://{SECRET}@127.0.0.1:{other.port}?give_up_s=0.1")
    assert type(raised.value) is error
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (401, "unauthenticated", Unauthenticated),
        (403, "forbidden", Forbidden),
        (429, "limit_exceeded", LimitExceeded),
        (413, "body_too_large", PayloadTooLarge),
        (500, "internal", DibsError),
        (422, "something_new", DibsError),
    ],
)
async def test_errors_by_name(status: int, code: str, error: type[DibsError]) -> None:
    """An error that a server names comes back as that error; one that is not known here says its name."""
    body = json.dumps({"error": "because", "code": code, "retryAfterSeconds": 30.0}).encode()
    async with impostor(lambda number: ABOUT if number == 0 else answer(status, body)) as other:
        async with await open_store(f"{other.url}?give_up_s=1") as store:
            with pytest.raises(error, match="because") as raised:
                await store.stats(TENANT)
        assert len(other.heads) == 2
    assert type(raised.value) is error
    if isinstance(raised.value, LimitExceeded):
        assert raised.value.retry_after_s == 30.0


async def test_what_a_server_says_is_one_line() -> None:
    """Nobody can make a second line of it on somebody's terminal."""
    body = json.dumps({"error": "no\r\n\x1b[2JError: fake\u2028line", "code": "new\none"}).encode()
    async with (
        impostor(lambda number: ABOUT if number == 0 else answer(422, body)) as other,
        await open_store(f"{other.url}?give_up_s=1") as store,
    ):
        with pytest.raises(DibsError, match="fake") as raised:
            await store.stats(TENANT)
    assert str(raised.value).isprintable()


async def test_a_server_that_is_not_there() -> None:
    """The message says why, and nothing of TLS where there is none."""
    with pytest.raises(StoreUnavailable, match="does not answer: Connect call failed") as raised:
        await open_store(f"http://127.0.0.1:{free_port()}?give_up_s=0")
    assert "ssl" not in str(raised.value)


async def test_a_limit_that_is_soon_over() -> None:
    """A call that is told to wait for less than it may be repeated waits, and asks again."""
    body = json.dumps({"error": "slowly", "code": "limit_exceeded", "retryAfterSeconds": 0.01}).encode()
    stats = answer(200, msgspec.msgpack.encode({"total": {"command": ""}, "queues": []}))
    said = (ABOUT, answer(429, body), answer(429, body), stats)
    async with impostor(lambda number: said[number]) as other, await open_store(other.url) as store:
        assert (await store.stats(TENANT)).total.ready == 0


# ------------------------------------------------------------------------------------------------------ tokens, TLS


@pytest.mark.parametrize("token", [SECRET, "a/b+c==", "a@b:c?d#e[f]", "%41", "x" * 2000])
async def test_tokens(token: str) -> None:
    """A token may have any character that a header can have, percent-encoded in the URL."""
    async with impostor(ABOUT) as other:
        await (await open_store(f"http://{quote(token, safe='')}@127.0.0.1:{other.port}")).close()
    assert f"Authorization: Bearer {token}\r\n".lower() in other.heads[0].lower()
    assert f"Bearer {token}\r\n" in other.heads[0]


async def test_tokens_of_a_server(tmp_path: Path) -> None:
    """A server with keys knows the token in a URL, and what it allows."""
    token = new_token()
    tokens = tmp_path / "tokens.toml"
    add_token(tokens, StaticToken(name="w", sha256=hash_of(token), tenant="acme", scopes=[Scope.ENQUEUE]))
    service, port = await started(tmp_path, ServerConfig(keys=[KeyConfig(kind="tokens", path=str(tokens))]))
    async with await open_store(f"http://{token}@127.0.0.1:{port}") as store:
        assert isinstance((await store.enqueue("acme", [NewTask(command="a")]))[0], Enqueued)
        with pytest.raises(Forbidden):
            await store.claim("acme", ["a"])
        with pytest.raises(Forbidden):
            await store.enqueue("other", [NewTask(command="a")])
    for wrong in ("", f"{new_token()}@"):
        with pytest.raises(Unauthenticated):
            await open_store(f"http://{wrong}127.0.0.1:{port}")
    await service.stop()


async def test_a_token_that_ends_is_read_again(tmp_path: Path) -> None:
    """A worker whose token ends goes on with the next one in its file; all that is asked meanwhile is answered."""
    (tmp_path / "secret").write_bytes(SIGNING)
    keys = KeyConfig(kind="secret", path=str(tmp_path / "secret"), issuer=ISSUER, audience=AUDIENCE, leeway_s=0)
    service, port = await started(tmp_path, ServerConfig(keys=[keys]))
    ends_s = time.time() + 4.0
    (tmp_path / "token").write_text(hs256(claims(exp=ends_s)) + "\n")
    async with await open_store(f"http://127.0.0.1:{port}?token_file={tmp_path / 'token'}") as store:
        assert (await store.stats("acme")).total.ready == 0
        await asyncio.sleep(ends_s + 0.1 - time.time())
        with pytest.raises(Unauthenticated):
            await store.stats("acme")
        (tmp_path / "token").write_text(hs256(claims(exp=ends_s + 600)))
        assert len(await asyncio.gather(*(store.stats("acme") for _ in range(5)))) == 5
        (tmp_path / "token").unlink()
        assert (await store.stats("acme")).total.ready == 0
    for wrong in ("missing", "two\nlines"):
        (tmp_path / "token").write_text(wrong) if "\n" in wrong else None
        with pytest.raises(StoreRefused, match="token"):
            await open_store(f"http://127.0.0.1:{port}?token_file={tmp_path / 'token'}")
    await service.stop()


def test_tokens_are_not_shown() -> None:
    """Nothing that prints a server's URL, or knows its token, shows it."""
    url = f"https://{SECRET}@host:8080/base?give_up_s=1"
    assert mask(url) == "https://***@host:8080/base?give_up_s=1"
    assert mask(f"a {url}, and HTTP://{SECRET}@b") == "a https://***@host:8080/base?give_up_s=1, and HTTP://***@b"
    assert mask("http://host:8080/base") == "http://host:8080/base"
    for odd in (f"http://{SECRET}/{SECRET}@h", f"http://u:{SECRET}@h", f"http://a@{SECRET}@h", f"http:{SECRET}@h"):
        assert SECRET not in mask(odd)
    for odd in (f"htp://{SECRET}@h", f"http://h#{SECRET}", f"'https://h:1/x?y=1#{SECRET}': no", f"grpcs://{SECRET}@h"):
        assert SECRET not in mask(odd)
    assert SECRET not in repr(Settings(url=url))
    assert repr(Dibs(url)) == f"Dibs({mask(url)!r})"
    address = Address.of(url)
    assert address.token == SECRET
    assert SECRET not in f"{address} {address!r}"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for this machine that signed itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), *(x509.IPAddress(ipaddress.ip_address(one)) for one in ("127.0.0.1", "::1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    directory = tmp_path_factory.mktemp("tls")
    (directory / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (directory / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(directory / "cert.pem"), str(directory / "key.pem")


async def test_tls(tmp_path: Path, certificate: tuple[str, str]) -> None:
    """By https with the certificate that the URL names; without it, and by http, the server is not trusted."""
    cert, key = certificate
    service, port = await started(tmp_path, ServerConfig(tls_cert=cert, tls_key=key, stop_within_s=1.0))
    async with await open_store(f"https://127.0.0.1:{port}?ca_file={quote(cert)}") as store:
        await store.enqueue(TENANT, [NewTask(command="a", payload=b"x" * 500_000) for _ in range(4)])
        assert len(await store.claim(TENANT, ["a"], limit=4, wait_s=5.0)) == 4
    with pytest.raises(StoreRefused, match="ca_file"):
        await open_store(f"https://127.0.0.1:{port}")
    with pytest.raises(StoreUnavailable):
        await open_store(f"http://127.0.0.1:{port}?give_up_s=0")
    with pytest.raises(StoreRefused, match=r"none\.pem"):
        await open_store(f"https://127.0.0.1:{port}?ca_file={tmp_path}/none.pem")
    with pytest.raises(StoreRefused, match=r"key\.pem"):
        await open_store(f"https://127.0.0.1:{port}?ca_file={quote(key)}")
    await service.stop()


async def test_handshakes_that_do_not_end(tmp_path: Path, certificate: tuple[str, str]) -> None:
    """Those who never finish their handshake are in nobody's way, and in that of a stop neither."""
    cert, key = certificate
    service, port = await started(tmp_path, ServerConfig(tls_cert=cert, tls_key=key, stop_within_s=1.0))
    hello = bytes.fromhex("1603010200010001fc0303") + bytes(100)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
    for number, (_, writer) in enumerate(silent):
        writer.write(hello[:number])
    async with await open_store(f"https://127.0.0.1:{port}?ca_file={quote(cert)}") as store:
        assert isinstance((await store.enqueue(TENANT, [NewTask(command="a")]))[0], Enqueued)
    await service.stop()
    for _, writer in silent:
        writer.transport.abort()


async def test_https_where_http_is_spoken(between: Between) -> None:
    """A server without a certificate is told from one that is away."""
    with pytest.raises(StoreRefused, match="does not speak TLS"):
        await open_store(between.proxy.url.replace("http:", "https:"))


async def test_ipv6(tmp_path: Path) -> None:
    """A server at an IPv6 address is named in brackets."""
    service, port = await started(tmp_path, ServerConfig(host="::1"), "::1")
    async with await open_store(f"http://[::1]:{port}") as store:
        assert isinstance((await store.enqueue(TENANT, [NewTask(command="a")]))[0], Enqueued)
    await service.stop()
