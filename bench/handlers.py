"""The app that `bench.tasks` measures: handlers that do nothing, in each kind of lane. DIBS_URL names the store."""

from __future__ import annotations

from dibs import Dibs

app = Dibs()

RESULT = {"bytes": 1234567890}


@app.task
async def in_loop(url: str, width: int, height: int, note: str) -> dict[str, int]:  # noqa: ARG001 it does nothing
    return RESULT


@app.task
def in_thread(url: str, width: int, height: int, note: str) -> dict[str, int]:  # noqa: ARG001 it does nothing
    return RESULT
