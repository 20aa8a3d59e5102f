"""Readers of SGLang's events learn what kvtier's tiers have."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockStored
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

from kvtier.cache.block_cache import Change
from kvtier.connectors.sglang.shared import tier_events
from kvtier.connectors.sglang.shared.contract import EVENTS
from kvtier.connectors.sglang.shared.tier_events import TIER_EVENTS
from kvtier.core.types import DISK, HOST
from kvtier.index import State
from tests.engines.sglang.trees import FULL, PAGE, Tree, hook, wait_for

PAGE_BYTES = 2 * FULL.num_layers * PAGE * FULL.head_num * FULL.head_dim * 2
SALTS = (None, "tenant", "other")
MEDIA = {HOST: "CPU_PINNED", DISK: "DISK"}

Prompt = tuple[tuple[int, ...], str | None]


class Reader:
    """A router's index of one worker: blocks by what they are, and the media that have them."""

    def __init__(self) -> None:
        self._names: dict[int, Prompt] = {}  # all tokens up to a block's end, and the salt
        self.media: dict[Prompt, set[str]] = {}

    def read(self, events: Sequence[Any]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._names.clear()
                self.media.clear()
            elif isinstance(event, BlockStored):
                before = event.parent_block_hash
                tokens = () if before is None else self._names[before][0]
                for at, block in enumerate(event.block_hashes):
                    size = event.block_size
                    tokens = (*tokens, *event.token_ids[at * size : (at + 1) * size])
                    name = self._names.setdefault(block, (tokens, event.cache_salt))
                    assert name == (tokens, event.cache_salt), "one hash for two blocks"
                    self.media.setdefault(name, set()).add(str(event.medium))
            else:
                for block in event.block_hashes:
                    if block in self._names:
                        self.media[self._names[block]].discard(str(event.medium))

    def found(self, name: Prompt) -> set[str]:
        """Return the media of a block, without the device."""
        return {medium for medium in self.media.get(name, ()) if "GPU" not in medium}


@pytest.fixture(autouse=True)
def hooked() -> Iterator[None]:
    hook()
    with get_parallel().override(pp_rank=0, attn_tp_rank=0, attn_cp_rank=0):
        yield
    TIER_EVENTS.sources.clear()  # of trees that a failed test has not closed
    TIER_EVENTS.forget()


def held(tree: Tree, name: Prompt) -> set[str]:
    """Return the media in which kvtier has a block."""
    key = RadixKey(array("q", name[0]), cache_salt=name[1])
    page = bytes.fromhex(get_storage_hash_str(key, page_size=PAGE)[-1])
    index = tree.linker._linked["kv"].cache._index
    found = index.find(page)
    if found is None:
        return set()
    return {
        MEDIA[tier] for tier in index.tiers if index.states_of([found[0]], tier) == [State.READY]
    }


def blocks(prompt: Sequence[int], salt: str | None) -> list[Prompt]:
    ends = range(PAGE, len(prompt) + 1, PAGE)
    return [(tuple(prompt[:end]), salt) for end in ends]


def prompt_of(seed: int, num_pages: int) -> list[int]:
    return [seed * 1000 + at for at in range(num_pages * PAGE)]


def test_installed_sglang_differs_in_nothing() -> None:
    assert EVENTS.differences() == []


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("events", ["default", "dynamo"])
def test_a_reader_knows_the_tiers_of_all_blocks(tmp_path: Path, core: str, events: str) -> None:
    tree = Tree(
        FULL,
        tmp_path,
        core=core,
        events=events,
        host_capacity=24 * PAGE_BYTES,
        disk_capacity=40 * PAGE_BYTES,
    )
    reader, chosen = Reader(), random.Random(1)
    asked: list[Prompt] = []
    orphans: set[Prompt] = set()  # behind a block that was nowhere when all began anew

    def has_beginning(name: Prompt) -> bool:
        return all(held(tree, before) for before in blocks(*name)[:-1])

    for number in range(40):
        beginning = prompt_of(chosen.randrange(4), chosen.randrange(1, 4))
        prompt = beginning + prompt_of(100 + number, chosen.randrange(3))
        salt = chosen.choice(SALTS)
        tree.compute(prompt, salt)
        asked += blocks(prompt, salt)
        orphans.difference_update(blocks(prompt, salt))
        if not number % 5:
            tree.settle()
        if number % 7 == 6:
            tree.settle()
            tree.flush()
            orphans.update(name for name in asked if not has_beginning(name))
        reader.read(tree.cache.take_events())
    tree.settle()
    reader.read(tree.cache.take_events())
    there = {name: held(tree, name) for name in asked}
    known = {name: reader.found(name) for name in asked}
    assert all(known[name] <= there[name] for name in asked)
    used = [name for name in asked if name not in orphans]
    assert [known[name] for name in used] == [there[name] for name in used]
    assert len(used) > len(asked) / 3
    for medium in MEDIA.values():
        assert {medium in media for media in there.values()} == {True, False}
    tree.close()


def test_pages_of_an_earlier_process_are_published_when_a_prompt_names_them(
    tmp_path: Path,
) -> None:
    first = Tree(FULL, tmp_path, events="default")
    prompt = prompt_of(1, 4)
    first.compute(prompt)
    first.compute(prompt, "tenant")
    first.settle()
    first.close()
    second, reader = Tree(FULL, tmp_path, events="default"), Reader()
    wait_for(second, "r", prompt, len(prompt))  # they are read before the tree has them
    second.settle()
    reader.read(second.cache.take_events())
    assert not reader.media
    for salt in (None, "tenant"):
        second.compute(prompt, salt)
        second.settle()
        reader.read(second.cache.take_events())
        names = blocks(prompt, salt)
        assert [reader.found(name) for name in names] == [{"CPU_PINNED", "DISK"}] * 4
    second.close()


def test_without_events_nothing_is_collected(tmp_path: Path) -> None:
    tree = Tree(FULL, tmp_path)
    tree.compute(prompt_of(1, 4))
    tree.settle()
    assert tree.linker._take_changes() == []
    tree.close()


def test_salted_pages_that_are_forgotten_are_published_as_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier_events, "MAX_KNOWN", 4)
    tree, reader = Tree(FULL, events="default"), Reader()
    salted, plain = prompt_of(1, 4), prompt_of(2, 4)
    for prompt, salt in ((salted, "tenant"), (plain, None)):
        tree.compute(prompt, salt)
        tree.settle()
        reader.read(tree.cache.take_events())
    assert [reader.found(name) for name in blocks(salted, "tenant")] == [set()] * 4
    assert [reader.found(name) for name in blocks(plain, None)] == [{"CPU_PINNED"}] * 4
    keys = [
        bytes.fromhex(key) for key in get_storage_hash_str(RadixKey(array("q", plain)), None, PAGE)
    ]
    tree.compute(prompt_of(3, 4))
    reader.read(tree.cache.take_events())
    assert len(TIER_EVENTS._pages) == 4, "the plain ones are forgotten, too"
    removed = list(TIER_EVENTS._moved(Change(keys, HOST, True)))
    reader.read(removed)
    assert [reader.found(name) for name in blocks(plain, None)] == [set()] * 4
    tree.close()
