from __future__ import annotations

from dibs import Dibs
from dibs.listeners import TaskEvent


def test_a_map_tells_only_of_what_it_enqueued() -> None:
    """Of items whose key is taken, no listener hears: their ids name no task."""
    told: list[bytes] = []
    with Dibs("memory:") as app:

        @app.on("enqueued")
        def note(event: TaskEvent) -> None:
            told.append(event.task_id)

        @app.task(name="double")
        def double(x: int) -> int:
            return 2 * x

        batch = double.options(key="one").map([1, 2, 3])
        assert told == [batch.task_ids[0]] == list(dict.fromkeys(batch.task_ids))
