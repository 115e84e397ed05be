from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT


def test_the_demo_accounts_for_every_task(tmp_path: Path) -> None:
    """With a worker killed in the middle, all that was enqueued is completed, dead, cancelled or left; the demo says so
    in 80 columns and leaves nothing behind."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "core_demo.py"), "--quick"]
    env = os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "80"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "kill -9" in done.stdout
    assert "FAILS" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert not list(tmp_path.iterdir())
