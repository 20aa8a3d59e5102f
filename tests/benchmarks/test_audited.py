"""Mixed traffic with every hit audited: all tiers are, and a model that can't repeat is found."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.server import audited
from kvtier.cache.audit import AuditOutcome
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.serve.engine import paged
from kvtier.serve.engine.attention import attention

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audited, "DTYPES", ("float32",))


def test_hits_from_every_tier_are_audited_and_equal() -> None:
    rows: list[audited.Row] = []
    assert audited.run(["qwen3"], 0, rows.append) == rows
    (row,) = rows
    assert row.aborted < row.requests
    for tier in (DEVICE, HOST, DISK):
        assert row.num(AuditOutcome.EQUAL, tier), tier
    assert row.num(AuditOutcome.DIFFERENT) == row.num(AuditOutcome.WITHIN_TOLERANCE) == 0
    assert json.loads(json.dumps(asdict(row)))["audits"] == row.audits


def test_attention_that_does_not_repeat_its_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    chance = random.Random(0)

    def unstable(query: Any, *rest: Any) -> Any:
        return attention(query * chance.choice((1.0, 1.00001)), *rest)

    monkeypatch.setattr(paged, "attention", unstable)
    (row,) = audited.run(["qwen3"], 0, lambda row: None)
    assert row.num(AuditOutcome.DIFFERENT)
