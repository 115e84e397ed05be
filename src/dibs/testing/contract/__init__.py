# ruff: noqa: E402 - assertion rewriting has to be registered before the topics are imported.
"""The conformance suite: what every store promises, as tests that any store author can run.

A store's tests need a `harness` fixture and one line that takes the suite whole::

    # conftest.py
    @pytest.fixture
    def harness(tmp_path: Path) -> StoreHarness:
        return StoreHarness(open=lambda clock: open_my_store(tmp_path, clock=clock), reopens=True)

    # test_contract.py
    from dibs.testing.contract import *

Each topic is a module here; its classes and the fixtures they use come with the star. The suite runs on asyncio by
anyio's pytest plugin, on a clock that only the tests move, and never sleeps to let time pass. A gap is marked by the
store's author as a strict xfail with its reason.
"""

from __future__ import annotations

import pytest

_TOPICS = (
    "bad_input",
    "cancel",
    "claim",
    "clocks",
    "dead",
    "deadlines",
    "dedup",
    "delay",
    "durability",
    "enqueue",
    "expiry",
    "fairness",
    "fuzz",
    "heartbeat",
    "journal",
    "limits",
    "listing",
    "load_events",
    "load_keys",
    "load_rows",
    "load_times",
    "loads",
    "order",
    "queues",
    "ranges",
    "reading",
    "results",
    "runs",
    "settle",
    "stats",
    "sweep",
    "tenants",
    "tokens",
    "waits",
    "wakeups",
    "workers",
    "wrong_types",
)
# Before they are imported: a failing assertion then shows its values, though the tests are not in a test file.
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in (*_TOPICS, "harness", "steps")))

from dibs.testing.contract.bad_input import TestBadInput
from dibs.testing.contract.cancel import TestCancel
from dibs.testing.contract.claim import TestClaim, TestClaimId
from dibs.testing.contract.clocks import TestClocks
from dibs.testing.contract.dead import TestDeadLetters, TestPurge
from dibs.testing.contract.deadlines import TestDeadlines
from dibs.testing.contract.dedup import TestDedup, TestFreedKeys, TestReplayDead
from dibs.testing.contract.delay import TestDelay
from dibs.testing.contract.durability import TestClose, TestReopen
from dibs.testing.contract.enqueue import TestEnqueue
from dibs.testing.contract.expiry import TestExpiry
from dibs.testing.contract.fairness import TestFairClaims
from dibs.testing.contract.fuzz import TestFuzz
from dibs.testing.contract.harness import (
    StoreHarness,
    anyio_backend,
    clock,
    no_fallback,
    reopen,
    second,
    store,
    stores,
)
from dibs.testing.contract.heartbeat import TestHeartbeat
from dibs.testing.contract.journal import TestEvents
from dibs.testing.contract.limits import TestCaps, TestChangedLimits, TestKeysInFlight, TestRates
from dibs.testing.contract.listing import TestListing
from dibs.testing.contract.load_events import TestLoadEvents
from dibs.testing.contract.load_keys import TestLoadKeys
from dibs.testing.contract.load_rows import TestCancelledRows, TestLoadRows, TestShownRows
from dibs.testing.contract.load_times import TestLoadTimes
from dibs.testing.contract.loads import TestCommit, TestLoadInput, TestLoadsOutlive, TestStage
from dibs.testing.contract.order import TestOrder
from dibs.testing.contract.queues import TestQueues
from dibs.testing.contract.ranges import TestMarks, TestRanges
from dibs.testing.contract.reading import TestReading, TestTrimming
from dibs.testing.contract.results import TestKeepNothing, TestResults, TestRetain
from dibs.testing.contract.runs import TestRuns
from dibs.testing.contract.settle import TestSettle
from dibs.testing.contract.stats import TestStats
from dibs.testing.contract.sweep import TestSweep
from dibs.testing.contract.tenants import TestTenants
from dibs.testing.contract.tokens import TestTokens
from dibs.testing.contract.waits import TestWaitingForTheEnd
from dibs.testing.contract.wakeups import TestFallback, TestWaitingClaims
from dibs.testing.contract.workers import TestWorkers
from dibs.testing.contract.wrong_types import TestNoTime, TestWrongTypes

__all__ = [
    "StoreHarness",
    "TestBadInput",
    "TestCancel",
    "TestCancelledRows",
    "TestCaps",
    "TestChangedLimits",
    "TestClaim",
    "TestClaimId",
    "TestClocks",
    "TestClose",
    "TestCommit",
    "TestDeadLetters",
    "TestDeadlines",
    "TestDedup",
    "TestDelay",
    "TestEnqueue",
    "TestEvents",
    "TestExpiry",
    "TestFairClaims",
    "TestFallback",
    "TestFreedKeys",
    "TestFuzz",
    "TestHeartbeat",
    "TestKeepNothing",
    "TestKeysInFlight",
    "TestListing",
    "TestLoadEvents",
    "TestLoadInput",
    "TestLoadKeys",
    "TestLoadRows",
    "TestLoadTimes",
    "TestLoadsOutlive",
    "TestMarks",
    "TestNoTime",
    "TestOrder",
    "TestPurge",
    "TestQueues",
    "TestRanges",
    "TestRates",
    "TestReading",
    "TestReopen",
    "TestReplayDead",
    "TestResults",
    "TestRetain",
    "TestRuns",
    "TestSettle",
    "TestShownRows",
    "TestStage",
    "TestStats",
    "TestSweep",
    "TestTenants",
    "TestTokens",
    "TestTrimming",
    "TestWaitingClaims",
    "TestWaitingForTheEnd",
    "TestWorkers",
    "TestWrongTypes",
    "anyio_backend",
    "clock",
    "no_fallback",
    "reopen",
    "second",
    "store",
    "stores",
]
