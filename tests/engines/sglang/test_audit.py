"""Audits of the linker's hits, below SGLang's own tree."""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtier.cache.audit import AuditOutcome
from kvtier.connectors.sglang.shared.ranks import KV
from kvtier.core.errors import ConfigError
from kvtier.observe.specs import AUDITS
from tests.engines.sglang.trees import FULL, PAGE, SLIDING, Tree

PROMPT = [7000 + at for at in range(6 * PAGE)]


@pytest.fixture(params=[FULL, SLIDING], ids=["full", "sliding"])
def tree(request: pytest.FixtureRequest) -> Iterator[Tree]:
    made = Tree(request.param, audit=1.0)
    made.fill(0)
    yield made
    made.close()


def recompute(tree: Tree, wanted: list[torch.Tensor]) -> None:
    """Compute the prompt again: its KV has these bytes."""
    slots = tree._allocate(len(PROMPT))
    for (buffer, is_window), content in zip(tree.tensors(), wanted, strict=True):
        at = tree.pool.full_to_swa_index_mapping[slots] if is_window else slots
        buffer.view(torch.uint8)[at] = content
    tree.cache.insert(InsertParams(key=RadixKey(array("q", PROMPT)), value=slots))
    tree.settle()


def outcomes(tree: Tree) -> Counter[str]:
    found: Counter[str] = Counter()
    for (metric, labels), number in tree.linker._linked[KV].cache.metrics._recent.items():
        if metric is AUDITS:
            found[labels[1]] += int(number)
    return found


def keep(tree: Tree) -> list[torch.Tensor]:
    """Have the prompt in host memory only. Return its bytes."""
    wanted = tree.compute(PROMPT)
    tree.settle()
    tree.flush()
    return wanted


def test_recomputed_pages_that_are_equal_are_counted(tree: Tree) -> None:
    wanted = keep(tree)
    _, found = tree.find("audited", PROMPT)
    assert found < len(PROMPT)
    assert tree.find("audited", PROMPT)[1] == found, "the same answer, however often it is asked"
    assert tree.find("another", PROMPT)[1] == len(PROMPT), "one audit at a time"
    recompute(tree, wanted)
    assert outcomes(tree) == {AuditOutcome.EQUAL: 1, AuditOutcome.SKIPPED: 1}


def test_difference_is_logged_and_what_was_stored_before_is_missed(
    tree: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = keep(tree)
    _, found = tree.find("audited", PROMPT)
    first = found // PAGE
    linked = tree.linker._linked[KV]
    (key, *_) = tree.linker._audits.pages.current.keys
    (slot,) = linked.cache.hold([key]).slots
    linked.cache.release([key])
    memory: Any = linked.copies._host.memory
    at = memory.address + slot * linked.copies._pool.slot_bytes + 3
    ctypes.c_uint8.from_address(at).value ^= 0x20
    with caplog.at_level(logging.WARNING):
        recompute(tree, wanted)
    assert outcomes(tree) == {AuditOutcome.DIFFERENT: 1}
    assert "tier=host age_s=0 writer='this process'" in caplog.text
    assert f"first_token={first * PAGE}" in caplog.text
    tree.flush()
    assert tree.find("next", PROMPT)[1] == 0, "what was stored before is missed"
    recompute(tree, wanted)
    tree.flush()
    _, found = tree.find("again", PROMPT)
    assert 0 <= found < len(PROMPT), "what was stored since is found, and audited"
    recompute(tree, wanted)
    assert outcomes(tree) == {AuditOutcome.DIFFERENT: 1, AuditOutcome.EQUAL: 1}


def test_nothing_is_used_after_a_second_difference(tree: Tree) -> None:
    wanted = keep(tree)
    for number in range(2):
        tree.find(f"audited {number}", PROMPT)
        recompute(tree, [part.roll(1, dims=0) for part in wanted])
        tree.flush()
        tree.find(f"miss {number}", PROMPT)
        recompute(tree, wanted)
        tree.flush()
    assert outcomes(tree)[AuditOutcome.DIFFERENT] == 2
    assert tree.find("last", PROMPT)[1] == 0


def test_pages_from_disk_are_audited(tmp_path: Path) -> None:
    first = Tree(FULL, tmp_path)
    first.fill(0)
    wanted = first.compute(PROMPT)
    first.settle()
    first.close()
    tree = Tree(FULL, tmp_path, audit=1.0)
    tree.fill(1)
    tree.find("warm", PROMPT)
    tree.settle()
    _, found = tree.find("audited", PROMPT)
    assert found < len(PROMPT)
    recompute(tree, wanted)
    assert outcomes(tree)[AuditOutcome.EQUAL] == 1
    tree.close()


def test_share_above_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="audit: 2 is no share of hits"):
        Tree(FULL, audit=2)
