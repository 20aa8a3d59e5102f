"""Shared by all tests: hypothesis profiles, and no way to the network."""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.kit.effort import EFFORT, chosen_cases

# Models are built in or local; a test that would download one must fail at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Several tests run at once: threads that wait for others leave them the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Chosen by HYPOTHESIS_PROFILE. No deadline: unit tests are not timed, machines differ.
_COMMON: Any = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("default", max_examples=50, **_COMMON)
settings.register_profile("ci", max_examples=7, **_COMMON)
settings.register_profile("sanitize", max_examples=15, **_COMMON)
settings.register_profile("nightly", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


LEFT_OUT = pytest.StashKey[tuple[int, int]]()
"""Numbers of nightly tests and of cases of other tests that this process has left out."""
OTHER_SUITES = (
    "test-vllm test-sglang test-stores test-routers test-docs test-page test-dashboard "
    "check-native crash-test"
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = chosen_cases({item.nodeid: "nightly" in item.keywords for item in items})
    left_out = [item for item in items if item.nodeid not in chosen]
    nightly = sum("nightly" in item.keywords for item in left_out)
    config.stash[LEFT_OUT] = (nightly, len(left_out) - nightly)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in chosen]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Give the counts of a worker process of pytest-xdist to the process that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, (0, 0))


class _WorkerCounts:
    """Receives what the workers of pytest-xdist have left out: each collects the same tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if counts := getattr(node, "workeroutput", {}).get("left_out"):
            self._config.stash[LEFT_OUT] = tuple(counts)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Under nohup: servers that tests start would ignore it, too. A handler is not inherited.
        signal.signal(signal.SIGHUP, lambda *_: None)
    config.pluginmanager.register(_WorkerCounts(config))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the tests that did not run, and why: the choice, then what this machine lacks."""
    nightly, cases = config.stash.get(LEFT_OUT, (0, 0))
    write = terminalreporter.write_line
    terminalreporter.section("left out")
    if nightly or cases:
        write(
            f"KVTIER_EFFORT={EFFORT}: {nightly} nightly tests, and {cases} further cases of tests "
            "that ran with one case; `make test` without KVTIER_EFFORT runs them"
        )
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, number in reasons.most_common():
        write(f"{number:>5} skipped: {reason}")
    write(f"suites of their own: make {OTHER_SUITES}")


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Undo a connector's changes to the logger after the test."""
    logger = logging.getLogger("kvtier")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)
