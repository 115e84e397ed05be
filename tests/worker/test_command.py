"""`dibs worker` as it is used: real processes, real signals, a store on disk."""

from __future__ import annotations

import shutil
import signal
from collections import Counter

import psutil
import pytest

from dibs.errors import TaskFailed
from dibs.task import EventKind, Filter, Status
from tests.worker.commands import Shop, until
from tests.worker.steps import journal


async def put(shop: Shop, command: str, count: int = 1, **options: object) -> list[bytes]:
    """Enqueues tasks ``{"value": 0}``, ``{"value": 1}`` …; returns their ids."""
    async with shop.app() as app:
        function = app.task(name=command, **options)(_taking)  # type: ignore[call-overload]
        return list((await function.amap(range(count))).task_ids)


def _taking(value: int) -> None: ...


async def statuses(shop: Shop) -> Counter[tuple[Status, int]]:
    """How many tasks stand how, after how many attempts."""
    async with shop.app() as app:
        found: Counter[tuple[Status, int]] = Counter()
        cursor: str | None = None
        while True:
            page = await app.ask(lambda store, at=cursor: store.list("default", Filter(), cursor=at, limit=1000))  # type: ignore[misc]
            found.update((task.status, task.attempts) for task in page.tasks)
            cursor = page.cursor
            if cursor is None:
                return found


SLOW = """
@app.task(lease_s=1)
def slow(value: int) -> None:
    note(f"start {value} {current().attempt}")
    time.sleep(float((HERE / "nap").read_text()))
    note(f"end {value}")
"""


async def test_a_killed_worker_loses_nothing(shop: Shop) -> None:
    """kill -9 in the middle of a handler: another worker runs the task once the lease is over."""
    shop.write(SLOW)
    (shop.directory / "nap").write_text("30")
    await put(shop, "shop.slow", lease_s=1)
    first = shop.worker()
    until(shop.log)
    first.signal(signal.SIGKILL)
    assert first.ended() == -signal.SIGKILL
    (shop.directory / "nap").write_text("0")
    # A drain would find the task still leased, and end: this one runs until the task is done.
    second = shop.worker()
    until(lambda: "end 0" in shop.log(), lambda: second.output)
    second.signal(signal.SIGTERM)
    assert second.ended() == 0
    assert sorted(shop.log()) == ["end 0", "start 0 1", "start 0 2"]
    assert await statuses(shop) == {(Status.COMPLETED, 2): 1}


async def test_sigterm_ends_what_runs_and_gives_back_the_rest(shop: Shop) -> None:
    """After SIGTERM handlers end within the grace time, nothing new starts, and the worker exits with 0."""
    shop.write(SLOW)
    (shop.directory / "nap").write_text("1")
    await put(shop, "shop.slow", 20)
    worker = shop.worker("--threads", "4")
    until(lambda: len(shop.log()) >= 4, lambda: worker.output)
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0, worker.output
    lines = Counter(line.split()[0] for line in shop.log())
    assert lines["start"] == lines["end"]
    seen = await statuses(shop)
    assert seen == {(Status.COMPLETED, 1): lines["end"], (Status.PENDING, 0): 20 - lines["end"]}
    assert f"{lines['end']} completed" in worker.output


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("twice", [False, True])
async def test_handlers_that_do_not_end_are_given_back(shop: Shop, kind: str, twice: bool) -> None:
    """When the grace time is over, or at the second SIGTERM, tasks are released with their attempt, and the worker is
    gone although a thread never ends."""
    nap = "await asyncio.sleep(300)" if kind == "async def" else "time.sleep(300)"
    shop.write(f"@app.task\n{kind} slow(value: int) -> None:\n    note('start')\n    {nap}\n")
    await put(shop, "shop.slow", 3)
    worker = shop.worker("--grace", "5m" if twice else "200ms")
    until(lambda: len(shop.log()) == 3, lambda: worker.output)
    worker.signal(signal.SIGTERM)
    worker.says("stopping")
    if twice:
        worker.signal(signal.SIGTERM)
    assert worker.ended() == 0, worker.output
    assert await statuses(shop) == {(Status.PENDING, 0): 3}
    assert "Traceback" not in worker.output


async def test_a_blocked_loop_does_not_keep_a_worker(shop: Shop) -> None:
    """A handler that blocks its event loop for ever is left behind; its task is given back."""
    shop.write("@app.task\nasync def block(value: int) -> None:\n    note('start')\n    time.sleep(300)\n")
    await put(shop, "shop.block")
    worker = shop.worker("--grace", "100ms")
    until(shop.log, lambda: worker.output)
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0, worker.output
    assert await statuses(shop) == {(Status.PENDING, 0): 1}


async def test_a_listener_that_never_returns_does_not_keep_a_worker(shop: Shop) -> None:
    """The worker ends, with what it did, although a listener hangs."""
    shop.write(
        "@app.task\nasync def work(value: int) -> None: ...\n\n"
        "@app.on('completed')\ndef never(event) -> None:\n    time.sleep(300)\n"
    )
    await put(shop, "shop.work", 3)
    worker = shop.worker("--drain")
    assert worker.ended() == 0, worker.output
    assert "listeners are still busy" in worker.output
    assert await statuses(shop) == {(Status.COMPLETED, 1): 3}


async def test_ten_thousand_tasks_run_exactly_once(shop: Shop) -> None:
    """Two processes drain 10,000 tasks together: each runs once, both take part, and both end."""
    shop.write("@app.task\nasync def work(value: int) -> None:\n    note(value)\n")
    await put(shop, "shop.work", 10_000)
    worker = shop.worker("--processes", "2", "--drain", "--quiet")
    assert worker.ended() == 0, worker.output
    assert sorted(map(int, shop.log())) == list(range(10_000))
    assert len(list(shop.directory.glob("log-*.txt"))) == 2
    assert await statuses(shop) == {(Status.COMPLETED, 1): 10_000}


def children(pid: int) -> list[psutil.Process]:
    """The processes that a process has started."""
    return psutil.Process(pid).children()


async def test_the_supervisor_restarts_a_killed_worker(shop: Shop) -> None:
    """A worker process that is killed is replaced; SIGTERM to the supervisor ends them all, with 0."""
    shop.write(SLOW)
    (shop.directory / "nap").write_text("0")
    worker = shop.worker("--processes", "2")
    before = until(lambda: (some := children(worker.pid)) and len(some) == 2 and some)
    before[0].kill()
    until(lambda: len(now := children(worker.pid)) == 2 and before[0] not in now, lambda: worker.output)
    assert "killed by SIGKILL; starting another" in worker.output
    await put(shop, "shop.slow", 5)
    until(lambda: len(shop.log()) == 10, lambda: worker.output)
    now = children(worker.pid)
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0, worker.output
    assert not any(one.is_running() for one in now)


async def test_a_task_that_kills_its_worker_is_given_up(shop: Shop) -> None:
    """Attempts count at the claim: a task that ends every worker is dead after max_attempts runs, and the others are
    done."""
    shop.write(
        "@app.task\ndef work(value: int) -> None:\n    note(value)\n"
        "    if value == 0:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    [killer, *_] = await put(shop, "shop.work", 5, lease_s=1, max_attempts=2)
    worker = shop.worker("--processes", "2", "--threads", "1")
    async with shop.app() as app:
        with pytest.raises(TaskFailed, match="LEASE_EXPIRED, attempt 2 of 2"):
            await app.handle(killer).awaited(40)
    until(lambda: set(shop.log()) == set("01234"), lambda: worker.output)
    assert shop.log().count("0") == 2
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0, worker.output


def test_the_workers_end_with_their_supervisor(shop: Shop) -> None:
    """kill -9 of the supervisor leaves no worker behind, not even one that has only just been started."""
    shop.write(SLOW)
    worker = shop.worker("--processes", "2")
    started = until(lambda: (some := children(worker.pid)) and len(some) == 2 and some)
    psutil.Process(worker.pid).kill()
    worker.ended()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []


@pytest.mark.parametrize(
    ("code", "app", "says"),
    [
        ("", "nowhere:app", "there is no module nowhere"),
        ("", "shop:nothing", "shop:nothing is not an app: there is no such name"),
        ("", "shop:HERE", "shop:HERE is not an app: that is a PosixPath"),
        ("", "nowhere.py:app", "there is no file nowhere.py"),
        ("other = Dibs('memory:')", "shop", "it has 2: app, other. Write shop:app"),
        ("def broken(:", "shop:app", "SyntaxError"),
        ("import not_there_at_all", "shop:app", "it needs not_there_at_all, which is not installed"),
        ("1 / 0", "shop:app", "ZeroDivisionError"),
        ("", "shop:app", "no function is declared with @app.task"),
    ],
)
def test_an_app_that_cannot_be_imported(shop: Shop, code: str, app: str, says: str) -> None:
    """Exit status 2, and a message without a traceback that says what is wrong."""
    shop.write(code)
    worker = shop.worker(app=app)
    assert worker.ended() == 2
    assert says in worker.output
    assert "Traceback" not in worker.output


def test_several_processes_that_cannot_start_end_too(shop: Shop) -> None:
    """A supervisor whose workers have no chance ends with their status, instead of starting them for ever."""
    shop.write(SLOW)
    (shop.directory / "store").write_text("a file is in the way")
    worker = shop.worker("--processes", "2")
    assert worker.ended() == 3, worker.output


@pytest.mark.parametrize("how", ["a file", "foreign"])
def test_a_store_that_cannot_be_used(shop: Shop, how: str) -> None:
    """A directory that cannot be used: exit status 3 and a message."""
    shop.write(SLOW)
    store = shop.directory / "store"
    if how == "a file":
        store.write_text("not a directory")
    else:
        store.mkdir()
        (store / "data.mdb").write_text("not a store " * 1000)
    worker = shop.worker()
    assert worker.ended() == 3, worker.output
    assert "Error:" in worker.output
    assert "Traceback" not in worker.output


async def test_reload(shop: Shop) -> None:
    """With --reload a change of a file restarts the worker; one that does not even import waits for the next change."""
    shop.write("@app.task\ndef work(value: int) -> None:\n    note('old')\n")
    worker = shop.worker("--reload")
    until(lambda: len(children(worker.pid)) == 1)
    await put(shop, "shop.work")
    until(lambda: shop.log() == ["old"], lambda: worker.output)
    shop.write("this is not python")
    worker.says("shop.py changed: restarting")
    worker.says("waiting for a change")
    shop.write("@app.task\ndef work(value: int) -> None:\n    note('new')\n")
    await put(shop, "shop.work")
    until(lambda: sorted(shop.log()) == ["new", "old"], lambda: worker.output)
    worker.signal(signal.SIGINT)
    assert worker.ended() == 0, worker.output


BREAKING = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

@app.task
def work(value: int) -> str:
    note("run")
    if value == 0:
        # From now on every write beyond what the file has fails.
        size = os.stat(HERE / "store" / "data.mdb").st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    return "x" * 900_000

@app.task
def stuck(value: int) -> None:
    time.sleep(300)
"""


async def test_a_store_that_breaks_ends_the_worker(shop: Shop) -> None:
    """When writes fail for longer than --give-up, the worker says so and ends with status 3, also while a handler
    hangs; the task is not lost."""
    shop.write(BREAKING)
    await put(shop, "shop.stuck")
    await put(shop, "shop.work")
    worker = shop.worker("--give-up", "1s", "--grace", "200ms")
    assert worker.ended() == 3, worker.output
    assert "does not answer" in worker.output
    assert "giving up" in worker.output
    seen = await statuses(shop)
    assert sum(seen.values()) == 2
    assert (Status.COMPLETED, 1) not in seen


async def test_a_store_that_recovers_is_used_again(shop: Shop) -> None:
    """A worker whose writes failed for a while goes on when they work again."""
    shop.write(
        BREAKING
        + """
import threading

def recover():
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@app.on("claimed")
def later(event) -> None:
    threading.Timer(2, recover).start()
"""
    )
    [task_id] = await put(shop, "shop.work")
    worker = shop.worker("--give-up", "60s")
    worker.says("answers again")
    async with shop.app() as app:
        assert len(await app.handle(task_id).awaited(30)) == 900_000
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0


async def test_a_directory_that_is_removed(shop: Shop) -> None:
    """A worker whose store's directory was removed notices, and ends with an error."""
    shop.write(SLOW)
    await put(shop, "shop.slow", 0)
    worker = shop.worker("--give-up", "1s")
    worker.says("in a thread")
    until(lambda: any(shop.directory.glob("store/wake/*")), lambda: worker.output)
    shutil.rmtree(shop.directory / "store")
    assert worker.ended() == 3, worker.output


@pytest.mark.parametrize("via", ["module", "file"])
@pytest.mark.parametrize("script", ["shop.py", "pkg/shop.py"])
def test_a_script_and_its_worker_agree_on_names(shop: Shop, script: str, via: str) -> None:
    """A script that is run and enqueues its own functions names them as the worker that imports it does."""
    shop.write(
        "@app.task\ndef work(value: int) -> int:\n    return value + 1\n\n"
        "if __name__ == '__main__':\n    print('result', work.call(41), work.command)\n",
        script,
    )
    module = script.removesuffix(".py").replace("/", ".")
    if "/" in script:
        (shop.directory / "pkg" / "__init__.py").touch()
    worker = shop.worker(app=f"{module}:app" if via == "module" else f"{script}:app")
    producer = shop.start(script)
    assert producer.ended() == 0, producer.output + worker.output
    assert producer.output == f"result 42 {module}.work\n"


def test_a_producer_in_a_spawned_process_uses_the_same_names(shop: Shop) -> None:
    """multiprocessing imports the script again under a name of its own; tasks are named as ever."""
    shop.write(
        "import multiprocessing\n\n@app.task\ndef work(value: int) -> None: ...\n\n"
        "def produce(value):\n    work.enqueue(value)\n    return work.command\n\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(pool.map(produce, [1]))\n"
    )
    producer = shop.start("shop.py")
    assert producer.ended() == 0, producer.output
    assert producer.output == "['shop.work']\n"


async def test_json_tells_what_was_done(shop: Shop) -> None:
    """With --json the last line says how tasks ended, for scripts."""
    shop.write("@app.task\ndef work(value: int) -> None:\n    if value: raise Fail('NO')\n")
    await put(shop, "shop.work", 3)
    worker = shop.worker("--drain", "--json", "--quiet")
    assert worker.ended() == 0
    assert worker.lines[-1] == '{"completed":1,"retried":0,"failed":2,"cancelled":0,"lost":0}\n'


async def test_a_worker_names_itself_in_the_journal(shop: Shop) -> None:
    """What a worker takes is journalled under its name."""
    shop.write("@app.task\ndef work(value: int) -> None: ...\n")
    await put(shop, "shop.work")
    assert shop.worker("--drain", "--name", "me").ended() == 0
    async with shop.app() as app:
        assert [event.worker for event in await journal(app) if event.kind is EventKind.CLAIMED] == ["me"]


WAITS_FOR_A_THREAD = """
@app.task(name="waits")
async def waits():
    (HERE / "started").touch()
    await asyncio.to_thread(time.sleep, 300)
"""


async def test_a_thread_that_a_handler_started_does_not_keep_a_worker(shop: Shop) -> None:
    """asyncio.to_thread gives work to threads that the interpreter waits for: a worker that was told to stop does
    not."""
    shop.write(WAITS_FOR_A_THREAD)
    async with shop.app() as other:
        await other.task(name="waits")(lambda: None).aenqueue()
        worker = shop.worker("--grace", "100ms")
        until((shop.directory / "started").exists)
        worker.signal(signal.SIGTERM)
        assert worker.ended() == 0, worker.output


def test_flags_of_a_supervisor(shop: Shop) -> None:
    """What the supervisor adds stands before a bare --, and a worker has at least one process."""
    shop.write("@app.task(name='work')\ndef work() -> None: ...")
    running = shop.start("-m", "dibs", "worker", "--drain", "--processes", "2", "--", "shop:app")
    assert running.ended() == 0, running.output
    assert shop.worker("--processes", "0").ended() == 2


async def test_the_tenant_before_the_command(shop: Shop) -> None:
    """It means the same as after it."""
    shop.write("@app.task(name='work')\ndef work() -> None: ...")
    running = shop.start("-m", "dibs", "--tenant", "acme", "worker", "shop:app", "--drain")
    assert running.ended() == 0, running.output
    assert "(tenant acme)" in running.output


def test_an_import_that_fails_says_where(shop: Shop) -> None:
    """The line that raised is named, also if it raised SystemExit."""
    shop.write("import sys\n\nsys.exit('not today')\n")
    worker = shop.worker()
    assert worker.ended() == 2
    assert "SystemExit: not today" in worker.output
    assert "shop.py, line" in worker.output


async def test_a_worker_that_fails_ends_although_a_thread_does_not(shop: Shop) -> None:
    """Also on its way out with an error it waits for no thread that a handler left behind."""
    shop.write(WAITS_FOR_A_THREAD)
    async with shop.app() as other:
        await other.task(name="waits")(lambda: None).aenqueue()
    worker = shop.worker("--give-up", "1s")
    until((shop.directory / "started").exists)
    (shop.directory / "store").rename(shop.directory / "moved")
    assert worker.ended() == 3, worker.output


async def test_a_worker_that_somebody_else_stops_is_replaced(shop: Shop) -> None:
    """A supervisor keeps its number of workers, unless they end because nothing is left to do."""
    shop.write("@app.task(name='who')\ndef who() -> int: return os.getpid()")
    supervisor = shop.worker("--processes", "2", "--quiet")
    async with shop.app() as other:
        who = other.task(name="who")(lambda: 0)
        first = await who.acall(timeout_s=30)
        psutil.Process(first).terminate()
        psutil.Process(first).wait(30)
        until(lambda: len(psutil.Process(supervisor.pid).children()) == 2)
        assert await who.acall(timeout_s=30) != first
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ended() == 0
