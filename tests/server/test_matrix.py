"""Every route and every verb, against callers that must not get through."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from joserfc.jwk import OctKey

from dibs.errors import Forbidden, Unauthenticated
from dibs.ids import id_to_text, new_id
from dibs.server.app import Service, open_service
from dibs.server.auth import NEEDS, Scope
from dibs.server.config import ServerConfig
from dibs.server.http.listener import bind
from dibs.server.http.web import JSON, Route
from dibs.server.verifiers.keys import KeyConfig
from dibs.settings import Settings
from dibs.stores import open_store
from dibs.stores.protocol import Store
from dibs.stores.remote.verbs import PATH, VERBS
from dibs.task import Cause, Heartbeat, Kind, LeaseLost, NewTask, QueueConfig, Rows, Settlement, WorkerInfo
from tests.server.issuer import AUDIENCE, EC, ISSUER, RSA, SECRET, b64, claims, hs256, jwks, signed

OTHER_ISSUER = "https://keys.example.com"
EVERYTHING = "enqueue claim admin"


def token(scope: str = EVERYTHING, **others: Any) -> str:
    """A good token of the tenant acme, but for what is given."""
    return hs256(claims(**{"scope": scope, "exp": time.time() + 600, **others}))


async def make_service(tmp_path: Path) -> Service:
    """A server that believes an issuer with a secret, and another with public keys."""
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "jwks.json").write_bytes(jwks(RSA, EC))
    keys = [
        KeyConfig(kind="secret", path=str(tmp_path / "secret"), issuer=ISSUER, audience=AUDIENCE),
        KeyConfig(kind="jwks-file", path=str(tmp_path / "jwks.json"), issuer=OTHER_ISSUER, audience=AUDIENCE),
    ]
    return await open_service(ServerConfig(keys=keys), Settings(url="memory:"))


def routes() -> list[Route]:
    """Every route of a server that asks who calls, in the order of its table."""

    async def listed() -> list[Route]:
        service = await open_service(ServerConfig(), Settings(url="memory:"))
        await service.stop()
        return [route for route in service.web.routes if route.verb is not None]

    return asyncio.run(listed())


ROUTES = routes()
NAMES = [f"{route.method} {route.path}" for route in ROUTES]


class Client:
    """Calls a server with one token after the other."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url

    async def call(self, route: Route, bearer: str | None, *, body: bytes = b"", **places: str) -> tuple[int, Any]:
        """Calls a route and returns its status, and its body without what is different every time."""
        path = route.path
        for name in ("id", "command"):
            path = path.replace(f"{{{name}}}", places.get(name, id_to_text(new_id())))
        headers = {} if bearer is None else {"authorization": f"Bearer {bearer}"}
        if route.takes is not None:
            headers["content-type"] = route.content_type
        async with self._session.request(route.method, self.url + path, headers=headers, data=body) as response:
            data = await response.read()
            assert response.headers["x-request-id"]
            return response.status, json.loads(data) if response.content_type == JSON and data else data


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    """A server with keys."""
    service = await make_service(tmp_path)
    yield service
    await service.stop()


@pytest.fixture
async def client(service: Service) -> AsyncIterator[Client]:
    """A client without a token of its own."""
    bound = bind("127.0.0.1", 0)
    await service.start(bound)
    async with aiohttp.ClientSession() as session:
        yield Client(session, f"http://127.0.0.1:{bound.getsockname()[1]}")


def bad_tokens() -> Mapping[str, str | None]:
    """Tokens that no route may take, by what is wrong with them."""
    good = claims(scope=f"{EVERYTHING} operator", exp=time.time() + 600)
    from_keys = good | {"iss": OTHER_ISSUER}
    public_key = RSA.as_pem(private=False)
    own = EC.generate_key("P-256")
    return {
        "none": None,
        "empty": "",
        "rubbish": "rubbish",
        "not a token of this server": "dibs_" + "A" * 43,
        "expired": hs256(good | {"exp": time.time() - 3600}),
        "not valid yet": hs256(good | {"nbf": time.time() + 3600}),
        "no expiry": hs256({name: value for name, value in good.items() if name != "exp"}),
        "wrong audience": hs256(good | {"aud": "somebody-else"}),
        "no audience": hs256({name: value for name, value in good.items() if name != "aud"}),
        "wrong issuer": hs256(good | {"iss": "https://elsewhere.example.com"}),
        "no tenant": hs256({name: value for name, value in good.items() if name != "tid"}),
        "two tenants": hs256(good | {"tenantId": "other"}),
        "no scope": hs256(good | {"scope": "nothing that is known"}),
        "alg none": _unsigned(good, "none"),
        "alg None": _unsigned(good, "None"),
        "no signature": hs256(good).rpartition(".")[0] + ".",
        "changed after signing": _with_claims(hs256(good), good | {"tid": "other"}),
        "another secret": signed(OctKey.import_key(b"x" * 40), good, alg="HS256"),
        "HS256 by the public key": _by_hmac(public_key, from_keys),
        "RS256 by a key of its own": signed(RSA.generate_key(2048), from_keys, alg="RS256", kid="rsa"),
        "RS256 for the issuer with a secret": signed(RSA, good, alg="RS256", kid="rsa"),
        "key in the token": signed(own, from_keys, alg="ES256", kid="ec", jwk=own.as_dict(private=False)),
        "HS512": signed(OctKey.import_key(SECRET * 2), good, alg="HS512"),
        "too long": "a" * 10_000,
    }


def _unsigned(payload: Mapping[str, Any], algorithm: str) -> str:
    head = json.dumps({"alg": algorithm, "typ": "JWT"}).encode()
    return f"{b64(head)}.{b64(json.dumps(payload).encode())}."


def _by_hmac(key: bytes, payload: Mapping[str, Any]) -> str:
    """Signed with what every library refuses to take for a secret."""
    head = json.dumps({"alg": "HS256", "kid": "rsa"}).encode()
    signing = f"{b64(head)}.{b64(json.dumps(payload).encode())}"
    return f"{signing}.{b64(hmac.digest(key, signing.encode(), 'sha256'))}"


def _with_claims(jwt: str, others: Mapping[str, Any]) -> str:
    head, _, signature = jwt.split(".")
    return f"{head}.{b64(json.dumps(others).encode())}.{signature}"


BAD = bad_tokens()


def body_of(route: Route, asks: Mapping[str, Any]) -> bytes:
    """A body that the route can read: its own example, or what a client of the store would ask."""
    if route.takes is None:
        return b""
    if route.content_type == JSON:
        # Nobody has to wait for an answer that is not looked at.
        return json.dumps(
            {name: value for name, value in (route.example or {}).items() if name != "waitSeconds"}
        ).encode()
    return msgspec.msgpack.encode(asks[route.path.removeprefix(PATH)])


def asks_of(tenant: str, task_id: bytes, lease_token: bytes) -> dict[str, Any]:
    """For every verb of the store: something to ask about a tenant, and a task of it."""
    rows = Rows([b"1"], [NewTask(command="job")])
    about = {"tenant": tenant, "refs": [task_id]}
    acts = {"tenant": tenant, "which": [task_id]}
    return {
        "about": {},
        "enqueue": {"tenant": tenant, "tasks": [NewTask(command="job", id=new_id())]},
        "claim": {"tenant": tenant, "commands": ["job"]},
        "unclaim": {"tenant": tenant, "claim_id": new_id()},
        "heartbeat": {"beats": [Heartbeat(tenant=tenant, id=task_id, token=lease_token)]},
        "settle": {"settlements": [Settlement(tenant=tenant, id=task_id, token=lease_token, kind=Kind.RELEASE)]},
        "get": about,
        "cancel": about,
        "wait": {"tenant": tenant, "ids": [task_id], "wait_s": 0},
        "replay": acts,
        "purge": acts,
        "retain": {"tenant": tenant, "ids": [task_id], "result_ttl_s": 60},
        "list": {"tenant": tenant, "which": {}},
        "marks": {"tenant": tenant, "every": 1_000},
        "stage": {"tenant": tenant, "chunk_id": new_id(), "rows": rows},
        "commit_load": {"tenant": tenant, "name": "load", "seq": 0, "chunk_ids": []},
        "drop": {"tenant": tenant, "chunk_ids": [new_id()]},
        "stats": {"tenant": tenant},
        "queue": {"tenant": tenant, "command": "job"},
        "configure": {"tenant": tenant, "command": "job", "config": QueueConfig()},
        "register": {"tenant": tenant, "info": WorkerInfo(name="w"), "ttl_s": 60},
        "workers": {"tenant": tenant},
        "tenants": {},
        "journal_bounds": {},
        "runs": {"tenant": tenant},
        "readers": {},
        "advance": {"reader": "r", "shard": 0, "position": None},
        "sweep": {},
        "subscribe": {"topics": [{"type": "OnReady", "tenant": tenant, "command": "job"}]},
    }


NOTHING_IN_PARTICULAR = asks_of("acme", new_id(), bytes(16))


def test_every_verb_is_asked_something() -> None:
    """The matrix is about all verbs that there are."""
    assert NOTHING_IN_PARTICULAR.keys() == {verb.name for verb in VERBS}


@pytest.mark.parametrize("route", ROUTES, ids=NAMES)
async def test_a_bad_token_gets_nowhere(client: Client, route: Route) -> None:
    """Whatever is wrong with a token, every route says 401 and nothing else."""
    for why, bad in BAD.items():
        status, said = await client.call(route, bad, body=body_of(route, NOTHING_IN_PARTICULAR))
        assert (status, said["code"]) == (401, "unauthenticated"), why
        assert not bad or bad not in said["error"], why


@pytest.mark.parametrize("route", ROUTES, ids=NAMES)
async def test_only_the_scopes_that_it_needs(client: Client, route: Route) -> None:
    """A route takes the scopes that its verb names and an operator's, and says 403 to any other."""
    assert route.verb is not None
    for scope in Scope:
        if route.path.endswith("/subscribe") and scope in NEEDS[route.verb] | {Scope.OPERATOR}:
            continue  # answers for ever
        status, said = await client.call(route, token(scope), body=body_of(route, NOTHING_IN_PARTICULAR))
        if scope in NEEDS[route.verb] | {Scope.OPERATOR}:
            assert status not in (401, 403), (scope, said)
        else:
            assert (status, said["code"]) == (403, "forbidden"), scope


OF_TASKS = [route for route in ROUTES if "{id}" in route.path]


@pytest.mark.parametrize("route", OF_TASKS, ids=[f"{route.method} {route.path}" for route in OF_TASKS])
async def test_another_tenants_task_is_one_that_nobody_knows(client: Client, route: Route) -> None:
    """Of a task of another tenant a route says what it says of an id that was never used, in the same words; and the
    task is as it was."""
    async with await open_store(_with_token(client.url, token())) as store:
        task_id, lease = await _leased(store)
        before = await store.get("acme", [task_id])
        body = json.dumps({**(route.example or {}), "leaseToken": lease.hex()}).encode() if route.takes else b""
        spy = token(tid="other")
        about_it = await client.call(route, spy, body=body, id=id_to_text(task_id))
        unknown = id_to_text(new_id())
        about_nothing = await client.call(route, spy, body=body, id=unknown)
        assert about_it[0] == about_nothing[0] == 404
        assert _same_every_time(about_it[1], id_to_text(task_id)) == _same_every_time(about_nothing[1], unknown)
        assert await store.get("acme", [task_id]) == before


OF_TENANTS = [verb.name for verb in VERBS if "tenant" in verb.asks.__struct_fields__]


@pytest.mark.parametrize("name", OF_TENANTS)
async def test_a_verb_for_another_tenant_is_refused(client: Client, name: str) -> None:
    """A remote store with a token of one tenant gets nowhere with the name of another; an operator does."""
    [route] = [route for route in ROUTES if route.path == PATH + name]
    body = body_of(route, NOTHING_IN_PARTICULAR)
    status, said = await client.call(route, token(f"{EVERYTHING}", tid="other"), body=body)
    assert (status, said["code"]) == (403, "forbidden")
    status, _ = await client.call(route, token("operator", tid="other"), body=body)
    assert status == 200


async def test_another_tenants_lease_is_one_that_nobody_knows(client: Client) -> None:
    """A heartbeat or settlement with the right token, and the name of another tenant, is told that there is no such
    task; the lease is not touched."""
    async with (
        await open_store(_with_token(client.url, token())) as store,
        await open_store(_with_token(client.url, token(tid="other"))) as spy,
    ):
        task_id, lease = await _leased(store)
        before = await store.get("acme", [task_id])
        for tenant in ("acme", "other"):
            assert await spy.heartbeat([Heartbeat(tenant=tenant, id=task_id, token=lease)]) == [_UNKNOWN]
            assert await spy.settle([Settlement(tenant=tenant, id=task_id, token=lease, kind=Kind.FAIL)]) == [_UNKNOWN]
        assert await store.get("acme", [task_id]) == before


async def test_listening_to_another_tenant_is_refused(client: Client) -> None:
    """Nobody learns that something happens at another tenant's."""
    [route] = [route for route in ROUTES if route.path == PATH + "subscribe"]
    status, said = await client.call(route, token(tid="other"), body=body_of(route, NOTHING_IN_PARTICULAR))
    assert (status, said["code"]) == (403, "forbidden")


async def test_only_who_may_read_events_hears_of_them(client: Client) -> None:
    """That the journal grew is told to those who may read it; that a queue has tasks, to those whose command it is."""
    [route] = [route for route in ROUTES if route.path == PATH + "subscribe"]
    journal = msgspec.msgpack.encode({"topics": [{"type": "OnJournalled"}]})
    status, said = await client.call(route, token("enqueue claim"), body=journal)
    assert (status, said["code"]) == (403, "forbidden")
    queue = body_of(route, NOTHING_IN_PARTICULAR)
    status, said = await client.call(route, token(commands=["other"]), body=queue)
    assert (status, said["code"]) == (403, "forbidden")


async def test_a_token_for_some_commands_sees_no_others(client: Client) -> None:
    """What a token is not for cannot be enqueued, claimed, seen, counted, cancelled or configured by it."""
    async with (
        await open_store(_with_token(client.url, token())) as store,
        await open_store(_with_token(client.url, token(commands=["job"]))) as some,
    ):
        task_id, _ = await _leased(store, command="secret")
        [rejected] = await some.enqueue("acme", [NewTask(command="secret")])
        assert getattr(rejected, "code", None) == "forbidden"
        with pytest.raises(Forbidden):
            await some.claim("acme", ["secret"])
        with pytest.raises(Forbidden):
            await some.configure("acme", "secret", QueueConfig(paused=True))
        with pytest.raises(Forbidden):
            await some.stage("acme", new_id(), [NewTask(command="secret")])
        assert await some.get("acme", [task_id]) == [None]
        assert await some.wait("acme", [task_id], 0) == [None]
        assert [one.how for one in await some.cancel("acme", [task_id])] == ["unknown"]
        assert (await some.list("acme")).tasks == []
        stats = await some.stats("acme")
        assert (stats.total.leased, [queue.command for queue in stats.queues]) == (0, ["job"])
        assert (await some.events("acme")).events == []
        assert (await some.runs("acme")).runs == []


async def test_a_claim_id_opens_no_other_commands(client: Client) -> None:
    """Who repeats the claim id of another token gets none of its tasks of commands that it is not for."""
    async with (
        await open_store(_with_token(client.url, token())) as store,
        await open_store(_with_token(client.url, token(commands=["job"]))) as some,
    ):
        await store.enqueue("acme", [NewTask(command="secret")])
        claim_id = new_id()
        assert len(await store.claim("acme", ["secret"], claim_id=claim_id)) == 1
        assert await some.claim("acme", ["job"], claim_id=claim_id) == []


async def test_a_remote_store_says_what_is_wrong_with_its_token(client: Client) -> None:
    """A bad token is told when the store is opened, and without the token."""
    bad = str(BAD["expired"])
    with pytest.raises(Unauthenticated) as caught:
        await open_store(_with_token(client.url, bad))
    assert bad not in str(caught.value)


_UNKNOWN = LeaseLost(Cause.UNKNOWN)


async def _leased(store: Store, command: str = "job") -> tuple[bytes, bytes]:
    """A task of acme under a lease; its id, and the lease's token."""
    await store.enqueue("acme", [NewTask(command=command, payload=b"{}")])
    [lease] = await store.claim("acme", [command])
    return lease.id, lease.token


def _with_token(url: str, bearer: str) -> str:
    return url.replace("://", f"://{bearer}@")


def _same_every_time(said: Any, task_id: str) -> str:
    """A body as text, without the request's id, and with the task's id replaced."""
    return json.dumps({name: value for name, value in said.items() if name != "requestId"}).replace(task_id, "ID")
