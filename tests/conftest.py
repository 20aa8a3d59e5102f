"""Shared by all tests: hypothesis profiles, and no way to the network."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.effort import chosen_cases

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = chosen_cases({item.nodeid: "slow" in item.keywords for item in items})
    left_out = [item for item in items if item.nodeid not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in chosen]


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Undo a connector's changes to the logger after the test."""
    logger = logging.getLogger("kvtier")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)
