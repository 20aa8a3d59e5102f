"""The linker below SGLang's own tree: what it gives back is what the device had, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

import torch

from kvtier.connectors.sglang.contract import LINKER
from tests.sglang.trees import FULL, PAGE, SLIDING, WINDOW, Tree, wait_for

CORES = ("python",)
KINDS = {"full": FULL, "sliding": SLIDING}

Grows = Callable[..., Tree]


@pytest.fixture
def grows() -> Iterator[Grows]:
    """Makes trees that are closed in the end."""
    made: list[Tree] = []

    def make(kind: str, core: str = "python", folder: Path | None = None, **extra: object) -> Tree:
        made.append(Tree(KINDS[kind], core, folder, **extra))
        made[-1].fill(0)
        return made[-1]

    yield make
    for each in made:
        each.close()


def prompt(seed: int, num_pages: int) -> list[int]:
    return [seed * 1000 + at for at in range(num_pages * PAGE)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor], window: bool = False) -> bool:
    """window: buffers that keep a window have only the last tokens of those wanted."""
    pairs = zip(found, wanted, strict=True)
    return all(torch.equal(each, other[-len(each) :] if window else other) for each, other in pairs)


def test_installed_sglang_differs_in_nothing() -> None:
    assert LINKER.differences() == []


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_back_from_host_memory(grows: Grows, kind: str, core: str) -> None:
    tree = grows(kind, core)
    kept = {seed: tree.compute(prompt(seed, 5)) for seed in (1, 2, 3)}
    tree.settle()
    tree.flush()
    for seed, wanted in kept.items():
        req, found = tree.find(f"r{seed}", prompt(seed, 5))
        assert found == 5 * PAGE
        slots = tree.load(req)
        assert slots is not None
        assert same(tree.content(slots, WINDOW), wanted, window=True)


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
    assert found == 0  # told of is what is in host memory
    req = wait_for(second, "r", prompt(1, 6), 6 * PAGE)
    slots = second.load(req)
    assert slots is not None
    assert same(second.content(slots, WINDOW), wanted, window=True)
