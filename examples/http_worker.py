"""A worker that knows nothing of dibs but its HTTP API: what one in any other language does.

``dibs serve`` in one terminal, ``python examples/http_worker.py http://127.0.0.1:8080`` in another; then::

    curl --json '{"command": "shout", "payload": "hello"}' http://127.0.0.1:8080/v1/tasks

It ends after ten tasks, or when there was nothing to do for so many seconds as its second argument says.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
import urllib.request
import uuid
from typing import Any

LEASE_S = 30


class Server:
    """Calls a server; `token` is needed unless it is in development mode."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Returns the answer; None if it has none (204)."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers, method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = answer.read()
        return json.loads(said) if said else None


def main(url: str, idle_s: float = 20) -> None:
    server = Server(url)
    for _ in range(10):
        # The same claimId again, after an answer that was lost, would get the same task again and no other.
        asked = {"commands": ["shout"], "leaseSeconds": LEASE_S, "waitSeconds": idle_s, "claimId": str(uuid.uuid4())}
        task = server.post("/v1/tasks/claim", asked)
        if task is None:
            print("nothing to do")
            return
        work(server, task)


def work(server: Server, task: dict[str, Any]) -> None:
    path, token = f"/v1/tasks/{task['id']}", {"leaseToken": task["leaseToken"]}
    done = threading.Event()

    # A third of the lease leaves time for two more tries. A cancel, or a lost lease (403), would be heard here.
    def beat() -> None:
        while not done.wait(LEASE_S / 3):
            server.post(f"{path}/heartbeat", token)

    threading.Thread(target=beat, daemon=True).start()
    try:
        result = str(task["payload"]).upper() + "!"
    except Exception as error:  # noqa: BLE001 whatever the work raises is for its next attempt
        server.post(f"{path}/nack", {**token, "reason": str(error)})
    else:
        server.post(f"{path}/result", {**token, "status": "COMPLETED", "result": result})
        print(f"{task['id']}: {result}")
    finally:
        done.set()


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
