"""Queues, tenants and workers: ``dibs queues``, ``pause``, ``resume``, ``configure``, ``workers``, ``stats``."""

from __future__ import annotations

from typing import Any

import click
from msgspec.structs import asdict, replace

from dibs.checks import IN_FLIGHT_MAX
from dibs.cli.context import BURST, DURATION, RATE, RATE_UNITS, Command, Session, pass_session
from dibs.cli.errors import Exit
from dibs.cli.output import (
    Cell,
    Column,
    age_text,
    count_text,
    echo_fields,
    echo_json,
    echo_table,
    exact_duration_text,
    note,
    size_text,
)
from dibs.cli.shapes import config_shape, counts_shape, queue_shape, worker_shape
from dibs.settings import mask
from dibs.stores.local import LocalStore
from dibs.stores.protocol import ALL_TENANTS, Store
from dibs.task import (
    ALL_COMMANDS,
    MAX_ATTEMPTS_MAX,
    PRIORITY_MAX,
    PRIORITY_MIN,
    WEIGHT_MAX,
    KeyLimit,
    QueueConfig,
    QueueLimits,
    QueueStats,
    Stats,
    WorkerInfo,
)

# ------------------------------------------------------------------------------------------------------- queues


@click.command(
    cls=Command,
    examples="""
    dibs queues
    dibs queues thumbnail report
    dibs queues --json | jq '.queues[] | select(.dead > 0).command'
    """,
)
@click.argument("commands", metavar="[COMMAND]...", nargs=-1)
@pass_session
def queues(session: Session, /, commands: tuple[str, ...]) -> int:
    """Show each queue's counts and configuration.

    OLDEST is how long the task at the head of the queue has been ready. What a queue's configuration leaves open is
    the library's default. A line * is about the whole tenant, if that was configured.
    """

    async def look(store: Store) -> tuple[list[tuple[QueueStats, QueueConfig]], QueueStats, QueueConfig]:
        found = await store.stats(session.tenant, list(commands) or None)
        rows = [(queue, await store.configure(session.tenant, queue.command)) for queue in found.queues]
        return rows, found.total, await store.configure(session.tenant, ALL_COMMANDS)

    rows, total, whole = session.run(look)
    if session.json:
        queues = [queue_shape(queue, config) for queue, config in rows]
        echo_json({"tenant": session.tenant, "config": config_shape(whole), "queues": queues})
    else:
        if whole != QueueConfig():
            rows.append((replace(total, command=ALL_COMMANDS), whole))
        echo_table(QUEUE_COLUMNS, [_queue_row(*row) for row in rows], empty="No task was ever enqueued here.")
    return Exit.OK


QUEUE_COLUMNS = [
    Column("QUEUE", least=8), Column("READY", right=True), Column("DELAYED", right=True), Column("LEASED", right=True),
    Column("DEAD", right=True), Column("OLDEST", right=True), Column("SIZE", right=True), Column("CONFIG", least=6),
]  # fmt: skip


def _queue_row(queue: QueueStats, config: QueueConfig) -> list[Cell]:
    return [
        queue.command,
        count_text(queue.ready),
        count_text(queue.delayed),
        count_text(queue.leased),
        (count_text(queue.dead), "red" if queue.dead else ""),
        age_text(queue.oldest_ready_ms),
        size_text(queue.bytes),
        (_config_text(config), "yellow" if config.paused else ""),
    ]


def _config_text(config: QueueConfig) -> str:
    """What is set, in a few words."""
    words = ["paused"] if config.paused else []
    for name, value in asdict(config).items():
        if name == "backoff" and value is not None:
            words.append(f"backoff={value.kind}")
        elif name == "limits" and value is not None:
            words += _limit_words(value)
        elif name.endswith("_s") and value is not None:
            words.append(f"{name[:-2].replace('_', '-')}={exact_duration_text(value)}")
        elif name != "paused" and value is not None:
            words.append(f"{name.replace('_', '-')}={value}")
    return " ".join(words)


def _limit_words(limits: QueueLimits) -> list[str]:
    per_key = limits.per_key or KeyLimit()
    rate = None if per_key.rate is None else _rate_text(per_key.rate)
    burst = None if per_key.burst is None else f"{per_key.burst:g}"
    given = {"in-flight": limits.in_flight, "key-in-flight": per_key.in_flight, "key-rate": rate, "key-burst": burst}
    return [f"{name}={value}" for name, value in given.items() if value is not None]


def _rate_text(per_s: float) -> str:
    """``5/s``, ``100/m``, ``1/h``: the rate as one would write it, with the unit that makes it shortest."""
    return min((f"{per_s * size:.10g}/{unit}" for unit, size in RATE_UNITS.items()), key=len)


@click.command(
    cls=Command,
    examples="""
    dibs pause thumbnail
    dibs pause thumbnail && deploy && dibs resume thumbnail
    dibs --tenant acme pause report
    """,
)
@click.argument("command")
@pass_session
def pause(session: Session, /, command: str) -> int:
    """Stop claims from a queue; everything else goes on.

    Tasks can still be enqueued, and those in progress are finished. '*' stops all the queues of the tenant.
    """
    return _set(session, command, "paused", paused=True)


@click.command(
    cls=Command,
    examples="""
    dibs resume thumbnail
    dibs --tenant acme resume report
    """,
)
@click.argument("command")
@pass_session
def resume(session: Session, /, command: str) -> int:
    """Let a paused queue be claimed from again."""
    return _set(session, command, "resumed", paused=False)


@click.command(
    cls=Command,
    examples="""
    dibs configure report --priority 7 --max-attempts 3
    dibs configure import --lease 5m --result-ttl 1h
    dibs configure call-api --in-flight 50 --key-rate 100/m --key-in-flight 5
    dibs configure '*' --in-flight 200 --weight 3
    dibs configure import --reset
    """,
)
@click.argument("command")
@click.option("--priority", type=click.IntRange(PRIORITY_MIN, PRIORITY_MAX), help="Higher first.")
@click.option("--max-attempts", type=click.IntRange(1, MAX_ATTEMPTS_MAX), help="Deliveries before a dead letter.")
@click.option("--lease", "lease_s", type=DURATION, help="How long a claim holds without a heartbeat.")
@click.option("--result-ttl", "result_ttl_s", type=DURATION, help="How long results are kept.")
@click.option("--retention", "retention_s", type=DURATION, help="How long records and keys are kept.")
@click.option("--dead-retention", "dead_retention_s", type=DURATION, help="How long dead letters are kept.")
@click.option("--in-flight", type=click.IntRange(1, IN_FLIGHT_MAX), help="At most so many in progress.")
@click.option("--key-in-flight", type=click.IntRange(1, IN_FLIGHT_MAX),
              help="At most so many in progress of each limit_key.")  # fmt: skip
@click.option("--key-rate", type=RATE, help="At most so many starts of each limit_key: 5/s, 100/m, 1000/h, 10/d.")
@click.option("--key-burst", type=BURST, help="So many of them may start at once.  [one second's, at least 1]")
@click.option("--no-limits", is_flag=True, help="Forget the limits that were set before.")
@click.option("--weight", type=click.IntRange(1, WEIGHT_MAX), help="The tenant's share of workers that serve all.")
@click.option("--reset", is_flag=True, help="Forget what was set before; a paused queue stays paused.")
@pass_session
def configure(session: Session, /, command: str, reset: bool, **options: Any) -> int:
    """Set what a queue's tasks get by default, and its limits.

    What a task says for itself comes before this, and what is not given here stays as it is. The command '*' is about
    the whole tenant: --in-flight over all its queues, and --weight.
    """
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    if not given and not reset:
        raise click.UsageError("Say what to set, or --reset; `dibs queues` shows what is set.")
    return _set(session, command, "configured", reset=reset, **given)


def _set(session: Session, command: str, verb: str, *, reset: bool = False, **changes: Any) -> int:
    async def change(store: Store) -> tuple[QueueConfig, bool]:
        known = command in {queue.command for queue in (await store.stats(session.tenant)).queues}
        held = await store.configure(session.tenant, command)
        kept = QueueConfig(paused=held.paused) if reset else held
        config = await store.configure(session.tenant, command, _changed(kept, changes))
        return config, known or command == ALL_COMMANDS

    config, known = session.run(change)
    if session.json:
        echo_json({"tenant": session.tenant, "command": command, "config": config_shape(config)})
        return Exit.OK
    told = _config_text(config) if verb == "configured" else ""
    click.echo(f"{command} is {verb}{': ' if told else ''}{told}.")
    if not known:
        note("Nobody has used or configured it before; check the name if that surprises you.")
    return Exit.OK


def _changed(held: QueueConfig, changes: dict[str, Any]) -> QueueConfig:
    """The configuration with what was asked for; limits that are not named stay."""
    limits = QueueLimits() if "no_limits" in changes or held.limits is None else held.limits
    per_key = limits.per_key or KeyLimit()
    of_queue = {name: changes[name] for name in ("in_flight",) if name in changes}
    of_key = {name: changes[f"key_{name}"] for name in ("in_flight", "rate", "burst") if f"key_{name}" in changes}
    per_key = replace(per_key, **of_key)
    limits = replace(limits, **of_queue, per_key=None if per_key == KeyLimit() else per_key)
    others = {name: changes[name] for name in changes if name in QueueConfig.__struct_fields__}
    return replace(held, **others, limits=None if limits == QueueLimits() else limits)


# ------------------------------------------------------------------------------------------------------ workers


@click.command(
    cls=Command,
    examples="""
    dibs workers
    dibs workers --json | jq '.workers | map(.slots) | add'
    """,
)
@pass_session
def workers(session: Session, /) -> int:
    """Show the workers that are alive.

    A worker registers itself and is forgotten when it has not done so for a while. SEEN is how long ago it last did;
    with --json it also tells which tasks it runs.
    """
    found = session.run(lambda store: store.workers(session.tenant))
    if session.json:
        echo_json({"tenant": session.tenant, "workers": [worker_shape(worker) for worker in found]})
        return Exit.OK
    echo_table(WORKER_COLUMNS, [worker_row(worker) for worker in found], empty="No worker is registered.")
    return Exit.OK


WORKER_COLUMNS = [
    Column("WORKER", least=10), Column("HOST", least=6), Column("PID", right=True), Column("BUSY", right=True),
    Column("MEMORY", right=True), Column("UP", right=True), Column("SEEN", right=True), Column("COMMANDS", least=8),
]  # fmt: skip


def worker_row(worker: WorkerInfo) -> list[Cell]:
    """A worker's line in a table."""
    return [
        worker.name,
        worker.host,
        str(worker.pid),
        f"{worker.busy}/{worker.slots}",
        size_text(worker.memory_bytes),
        age_text(worker.started_ms or None),
        age_text(worker.seen_ms),
        " ".join(worker.commands),
    ]


# -------------------------------------------------------------------------------------------------------- stats


@click.command(
    cls=Command,
    examples="""
    dibs stats
    dibs stats --tenant '*'
    dibs stats --json | jq '.tenants[0].ready'
    """,
)
@pass_session
def stats(session: Session, /) -> int:
    """Show a tenant's totals, or every tenant's.

    The counts are exact. With --tenant '*', one line for each tenant that has anything here.
    """
    rows: list[tuple[str, Stats, int]] = []

    async def look(store: Store) -> str | None:
        for tenant in await _tenants(store, session.tenant_or_all):
            rows.append((tenant, await store.stats(tenant), len(await store.workers(tenant))))
        return store.store_id.hex() if isinstance(store, LocalStore) else None

    store_id = session.run(look)
    if session.json:
        echo_json(
            {"url": mask(session.settings.url), "store_id": store_id, "tenants": [_stats_shape(*row) for row in rows]}
        )
    elif session.tenant_or_all == ALL_TENANTS:
        columns = [Column("TENANT", least=8), *(Column(title, right=True) for title in STATS_TITLES)]
        echo_table(
            columns,
            [[tenant, *_stats_row(found, alive)] for tenant, found, alive in rows],
            empty="No tenant has anything here.",
        )
    else:
        [(tenant, found, alive)] = rows
        values = zip(STATS_TITLES, _stats_row(found, alive), strict=True)
        url = mask(session.settings.url)
        echo_fields([("store", url if store_id is None else f"{url} ({store_id})"), ("tenant", tenant),
                     *((title.lower(), value) for title, value in values)])  # fmt: skip
    return Exit.OK


STATS_TITLES = ("READY", "DELAYED", "LEASED", "DEAD", "OLDEST", "SIZE", "QUEUES", "WORKERS")


def _stats_row(found: Stats, alive: int) -> list[str]:
    total = found.total
    counts = [count_text(number) for number in (total.ready, total.delayed, total.leased, total.dead)]
    return [*counts, age_text(_oldest_ms(found)), size_text(total.bytes), str(len(found.queues)), str(alive)]


def _stats_shape(tenant: str, found: Stats, alive: int) -> dict[str, Any]:
    total = replace(found.total, oldest_ready_ms=_oldest_ms(found))
    paused = [queue.command for queue in found.queues if queue.paused]
    counts = {name: value for name, value in counts_shape(total).items() if name != "command"}
    return {"tenant": tenant, **counts, "queues": len(found.queues), "paused": paused, "workers": alive}


def _oldest_ms(found: Stats) -> int | None:
    return min((queue.oldest_ready_ms for queue in found.queues if queue.oldest_ready_ms is not None), default=None)


async def _tenants(store: Store, tenant: str) -> list[str]:
    if tenant != ALL_TENANTS:
        return [tenant]
    names: list[str] = []
    cursor: str | None = None
    while True:
        page = await store.tenants(cursor=cursor)
        names += page.tenants
        cursor = page.cursor
        if cursor is None:
            return names
