"""The linker below SGLang's own tree: loaded KV equals the device's KV, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

import torch

from kvtier.connectors.sglang.shared.contract import LINKER
from kvtier.core.errors import ConfigError
from kvtier.devices import Direction
from kvtier.devices.cpu import CpuDevice
from kvtier.testing import FaultyDevice
from tests.engines.sglang.trees import FULL, MAMBA, PAGE, SLIDING, WINDOW, Tree, wait_for

FULL_PAGE_BYTES = 2 * FULL.num_layers * PAGE * FULL.head_num * FULL.head_dim * 2
KINDS = {"full": FULL, "sliding": SLIDING}

Grows = Callable[..., Tree]


@pytest.fixture
def grows() -> Iterator[Grows]:
    """Makes trees, and closes them at the end."""
    made: list[Tree] = []

    def make(kind: str, folder: Path | None = None, **extra: Any) -> Tree:
        made.append(Tree(KINDS[kind], folder, **extra))
        made[-1].fill(0)
        return made[-1]

    yield make
    for each in made:
        each.close()


def prompt(seed: int, num_pages: int) -> list[int]:
    return [seed * 1000 + at for at in range(num_pages * PAGE)]


def keep(tree: Tree, seed: int, num_pages: int) -> list[torch.Tensor]:
    """Have a computed prompt in host memory only; return its bytes."""
    wanted = tree.compute(prompt(seed, num_pages))
    tree.settle()
    tree.flush()
    return wanted


def same(found: list[torch.Tensor], wanted: list[torch.Tensor], window: bool = False) -> bool:
    """Whether the bytes are equal. window: window buffers have only the last wanted tokens."""
    pairs = zip(found, wanted, strict=True)
    return all(torch.equal(each, other[-len(each) :] if window else other) for each, other in pairs)


def check_back(tree: Tree, rid: str, tokens: list[int], wanted: list[torch.Tensor]) -> None:
    """Load a whole prompt from host memory, and compare its bytes."""
    req, found = tree.find(rid, tokens)
    assert found == len(tokens)
    slots = tree.load(req)
    assert slots is not None
    assert same(tree.content(slots, WINDOW), wanted, window=True)


def test_installed_sglang_differs_in_nothing() -> None:
    assert LINKER.differences() == []


@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_back_from_host_memory(grows: Grows, kind: str) -> None:
    tree = grows(kind)
    kept = {seed: tree.compute(prompt(seed, 5)) for seed in (1, 2, 3)}
    tree.settle()
    tree.flush()
    for seed, wanted in kept.items():
        check_back(tree, f"r{seed}", prompt(seed, 5), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_back_from_disk_in_another_process(
    grows: Grows, tmp_path: Path, kind: str
) -> None:
    first = grows(kind, folder=tmp_path)
    wanted = first.compute(prompt(1, 6))
    first.settle()
    first.close()
    second = grows(kind, folder=tmp_path)
    second.fill(1)
    _, found = second.find("r", prompt(1, 6))
    assert found == 0  # only blocks in host memory are reported
    req = wait_for(second, "r", prompt(1, 6), 6 * PAGE)
    slots = second.load(req)
    assert slots is not None
    assert same(second.content(slots, WINDOW), wanted, window=True)


@pytest.mark.parametrize("mode", ["save_only", "load_only"])
def test_linker_finds_nothing_or_stores_nothing_as_its_mode_says(
    grows: Grows, tmp_path: Path, mode: str
) -> None:
    tree = grows("full", folder=tmp_path, mode=mode)
    keep(tree, 1, 6)
    _, found = tree.find("r", prompt(1, 6))
    assert found == 0
    tree.close()
    second = grows("full", folder=tmp_path)
    if mode == "save_only":
        wait_for(second, "r", prompt(1, 6), 6 * PAGE)
    else:
        assert second.find("r", prompt(1, 6))[1] == 0


def test_what_was_told_of_stays_until_it_is_loaded(grows: Grows) -> None:
    tree = grows("full", host_capacity=16 * FULL_PAGE_BYTES)
    wanted = keep(tree, 1, 6)
    req, found = tree.find("r", prompt(1, 6))
    assert found == 6 * PAGE
    for seed in range(2, 6):  # far more than there is room for
        tree.compute(prompt(seed, 8))
        tree.settle()
    slots = tree.load(req)
    assert slots is not None
    assert same(tree.content(slots), wanted)


def test_load_that_is_cancelled_holds_nothing(grows: Grows) -> None:
    tree = grows("full", host_capacity=8 * FULL_PAGE_BYTES)
    keep(tree, 1, 6)
    req, _ = tree.find("r", prompt(1, 6))
    tree.cache.linker.load_back(req)
    tree.cache.linker.release_request("r")
    assert tree.cache.ready_to_load_host_cache() == -1
    kept = keep(tree, 2, 8)  # all of host memory: the first prompt has to leave
    check_back(tree, "s", prompt(2, 8), kept)


def test_copy_that_fails_is_told_of_and_another_one_succeeds(grows: Grows) -> None:
    tree = grows("full")
    wanted = keep(tree, 1, 4)
    device = FaultyDevice(CpuDevice())
    tree.linker._engine._device = device  # what copies from now on
    device.fail(Direction.LOAD, 1)
    req, _ = tree.find("r", prompt(1, 4))
    assert tree.load(req) is None
    check_back(tree, "s", prompt(1, 4), wanted)


def test_new_weights_leave_no_pages_behind(grows: Grows, tmp_path: Path) -> None:
    tree = grows("full", folder=tmp_path)
    tree.compute(prompt(1, 4))
    tree.settle()
    tree.linker.before_new_weights()
    tree.linker.after_new_weights()
    tree.flush()
    assert tree.find("r", prompt(1, 4))[1] == 0
    wanted = keep(tree, 2, 4)  # and the new ones' are kept
    check_back(tree, "s", prompt(2, 4), wanted)


def test_new_weights_in_the_middle_of_a_store_keep_nothing_of_it(grows: Grows) -> None:
    """SGLang need not empty its own cache then. It gets the end of each store."""
    tree = grows("full")
    tree.compute(prompt(1, 4))
    assert len(tree.cache.linker.pending_offloads) == 1
    tree.linker.before_new_weights()
    tree.linker.after_new_weights()
    wanted = tree.compute(prompt(2, 4))
    tree.settle()  # both are reported
    tree.flush()
    assert tree.find("r", prompt(1, 4))[1] == 0
    check_back(tree, "s", prompt(2, 4), wanted)


def test_other_engines_find_nothing(grows: Grows, tmp_path: Path) -> None:
    first = grows("full", folder=tmp_path)
    first.compute(prompt(1, 4))
    first.settle()
    first.close()
    second = grows("full", folder=tmp_path, namespace="other weights")
    for _ in range(3):
        assert second.find("r", prompt(1, 4))[1] == 0
        second.settle()


def test_pools_that_sglang_does_not_resolve_are_refused_with_one_sentence(grows: Grows) -> None:
    with pytest.raises(ConfigError, match="does not say where its pages are") as caught:
        Tree(MAMBA)
    assert "\n" not in str(caught.value)
