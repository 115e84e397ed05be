from __future__ import annotations

from dibs.testing.contract import *  # noqa: F403 - a store takes the suite whole.
