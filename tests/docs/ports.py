"""Pages show a server at its usual port; tests run it at one that is free."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from tests.docs.pages import Block

PORT = "8080"


def at_a_free_port(shown: Iterable[Block]) -> list[Block]:
    """Returns blocks with another port than the one they show."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return [
        block._replace(code=block.code.replace(PORT, port).replace("$ dibs serve", f"$ dibs serve --port {port}"))
        for block in shown
    ]
