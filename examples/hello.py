"""The smallest app. In one terminal ``dibs worker examples/hello.py:app``, in another ``python examples/hello.py``."""

from __future__ import annotations

from dibs import Dibs

app = Dibs()


@app.task(max_attempts=5)
def greet(name: str, times: int = 1) -> str:
    return f"Hello {name}! " * times


if __name__ == "__main__":
    print(greet.call("world", times=2))
