"""A server and its remote store against the model in `dibs.testing.simulation`."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from dibs.clock import Clock
from dibs.server.app import Service, open_service
from dibs.server.config import ServerConfig
from dibs.server.http.listener import bind
from dibs.settings import Settings
from dibs.stores import open_store
from dibs.stores.local import LocalStore
from dibs.stores.protocol import Store
from dibs.testing.simulation import StoreMachine
from tests.model.test_model import TIMEOUT_S, histories


class RemoteMachine(StoreMachine):
    """A store behind a server, in the machine's own loop."""

    def __init__(self) -> None:
        self.service: Service | None = None
        super().__init__(self._opened)

    async def _opened(self, clock: Clock) -> Store:
        self.service = service = await open_service(ServerConfig(), Settings(url="memory:"), clock)
        bound = bind("127.0.0.1", 0)
        await service.start(bound)
        store = await open_store(f"http://127.0.0.1:{bound.getsockname()[1]}")
        closed = store.close

        async def close_both() -> None:
            await closed()
            await service.stop()

        store.close = close_both  # type: ignore[method-assign]
        return store

    async def check_at_the_end(self) -> None:
        """No record behind the server disagrees with another."""
        assert self.service is not None
        assert isinstance(self.service.gate.store, LocalStore)
        report = await self.service.gate.store.doctor()
        assert report.clean, report.problems
        assert report.tasks == len(self.model.tasks)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.usefixtures("no_sweep")
def test_a_remote_store_is_as_the_model() -> None:
    """Whatever is done through a server, in whatever order, is answered and stands as the rules say."""
    run_state_machine_as_test(RemoteMachine, settings=histories(40, steps=40))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("no_sweep")
def test_a_remote_store_is_as_the_model_for_long() -> None:
    """Far more and far longer histories through a server, new ones in every run."""
    run_state_machine_as_test(RemoteMachine, settings=histories(1_000, steps=120, anew=True))
