"""The cache content reconstructed from block events equals the cache's content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from kvtier.core.keys import grid_labels, token_labels
from kvtier.core.types import DEVICE, DISK, HOST, BlockId
from kvtier.index import State
from kvtier.observe import block_events
from kvtier.observe.block_events import BlockEvents, BlockLog
from tests.cache.tokens import test_cache_machine as machines
from tests.cache.tokens.harness import BLOCK_SIZE, NS, A, B, Harness, path_of
from tests.cache.tokens.test_cache_machine import small_steps

__all__ = ["small_steps"]

MEDIA = {"GPU": DEVICE, "CPU": HOST, "STORAGE": DISK}


class Reader:
    """A router that knows the cache content from events alone."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {tier: set() for tier in MEDIA.values()}
        self.ever: set[int] = set()
        self.parents: dict[int, int | None] = {}
        self.tokens: dict[int, tuple[int, ...]] = {}

    def read(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.__init__()  # type: ignore[misc]
                continue
            hashes, held = event["block_hashes"], self.held[MEDIA[event["medium"]]]
            assert hashes
            assert len(set(hashes)) == len(hashes)
            if event["type"] == "BlockRemoved":
                assert held.issuperset(hashes), "left, and never came"
                held.difference_update(hashes)
                continue
            assert held.isdisjoint(hashes), "came twice"
            held.update(hashes)
            self.ever.update(hashes)
            self._learn(event)

    def _learn(self, event: Mapping[str, Any]) -> None:
        size, tokens = event["block_size"], event["token_ids"]
        assert len(tokens) == size * len(event["block_hashes"])
        above = event["parent_block_hash"]
        for at, each in enumerate(event["block_hashes"]):
            if size:
                assert self.parents.setdefault(each, above) == above, "another parent"
                ids = tuple(tokens[at * size : (at + 1) * size])
                assert self.tokens.setdefault(each, ids) == ids, "other tokens"
            above = each


def hash_of(namespace: bytes, labels: Sequence[bytes]) -> int:
    """Return the event hash of a prefix, by an independent implementation."""
    found = blake3(namespace).digest()[:8]
    for label in labels:
        found = blake3(found + label).digest()[:8]
    return int.from_bytes(found, "little")


def block_log() -> BlockLog:
    """Return a log that knows the salts of the namespaces here: none."""
    log = BlockLog()
    for namespace in (NS, b"one", b"two"):
        log.name(namespace, "")
    return log


class ToldHarness(Harness):
    """A harness whose block events are read."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.reader = Reader()
        self.translator = self.cache.block_events()

    @staticmethod
    def make_events() -> BlockLog:
        return block_log()

    def listen(self) -> None:
        assert self.events is not None
        changes, was_lost = self.events.take()
        if was_lost:
            self.translator.clear()
            self.reader.read([block_events.CLEARED])
            return
        self.reader.read(self.translator.of(changes))

    def there(self) -> dict[str, set[int]]:
        """Return the hashes of the blocks in each tier."""
        found: dict[str, set[int]] = {tier: set() for tier in MEDIA.values()}
        for node in self.nodes():
            for tier, residency in zip(self.tiers, node.residencies, strict=True):
                if residency.state in (State.READY, State.EVICTING):
                    found[tier].add(hash_of(*path_of(node)))
        return found

    def check_reader(self) -> None:
        self.listen()
        there = self.there()
        for tier, hashes in there.items():
            assert self.reader.held[tier] == hashes & self.reader.ever
        assert self.reader.held[DEVICE] == there[DEVICE], "on the device, and never told"
        self.check_late_reader()

    def check_late_reader(self) -> None:
        """A snapshot has all blocks that a reader can place: those with all blocks before them."""
        late, known = Reader(), self.reader
        late.read(self.translator.snapshot())
        held = set().union(*known.held.values())
        placed: set[int] = set()
        for block in held:
            path = [block]
            while path[-1] in held and (above := known.parents[path[-1]]) is not None:
                path.append(above)
            if held.issuperset(path):
                placed.add(block)
        for tier, blocks in known.held.items():
            assert late.held[tier] == blocks & placed
        assert all(known.tokens[block] == tokens for block, tokens in late.tokens.items())


def _told(kind: type[machines.CacheMachine]) -> type[machines.CacheMachine]:
    class Told(kind):  # type: ignore[valid-type,misc]
        make_harness = ToldHarness

        @invariant()
        def reader_knows_what_is_there(self) -> None:
            if hasattr(self, "harness"):
                self.harness.check_reader()

    return Told


@pytest.mark.parametrize(
    "kind", [machines.StorageMachine, machines.WriteBackMachine], ids=lambda kind: kind.__name__
)
def test_readers_know_what_is_where_whatever_happens(kind: type[machines.CacheMachine]) -> None:
    run_state_machine_as_test(_told(kind), settings=settings(stateful_step_count=40))


@pytest.fixture
def harness() -> ToldHarness:
    return ToldHarness()


def test_a_prompt_is_told_with_its_tokens_in_each_tier_and_leaves_them(
    harness: ToldHarness,
) -> None:
    harness.serve(A)
    harness.listen()
    labels = token_labels(A, BLOCK_SIZE)
    expected = {hash_of(NS, labels[: at + 1]) for at in range(len(labels))}
    assert harness.reader.held == {DEVICE: expected, HOST: expected, DISK: set()}
    assert set(harness.reader.tokens.values()) == {tuple(A[:BLOCK_SIZE])}
    assert sorted(harness.reader.parents, key=str) == sorted(expected, key=str)
    harness.lose_the_device()
    harness.listen()
    assert harness.reader.held[DEVICE] == set()
    assert harness.reader.held[HOST] == expected
    harness.close()


def test_what_storage_kept_is_told_when_a_prompt_asks_for_it() -> None:
    harness = ToldHarness(disk_blocks=20)
    harness.serve(A)
    shelf = harness.shelf
    harness.end()
    harness = ToldHarness(disk_blocks=20, shelf=shelf)
    harness.listen()
    assert not harness.reader.ever
    harness.serve(A)
    harness.check_reader()
    labels = token_labels(A, BLOCK_SIZE)
    first = [hash_of(NS, labels[: at + 1]) for at in range(3)]
    assert harness.reader.held[DISK].issuperset(first)
    harness.end()


class Chunks:
    """Events of a cache whose chunks are 4 blocks of 2 tokens."""

    def __init__(self) -> None:
        self.log, self.reader = block_log(), Reader()
        self._events = BlockEvents([DEVICE, HOST], [], 2, 4)

    def read(self) -> list[Mapping[str, Any]]:
        found = list(self._events.of(self.log.take()[0]))
        self.reader.read(found)
        return found


def test_a_chunk_is_one_block_with_all_its_tokens() -> None:
    """The index keys the first block of a chunk by all tokens of the chunk; events have its own."""
    tokens, chunks = list(range(100, 116)), Chunks()
    labels = grid_labels(tokens, 2, 8)
    chunks.log.prompt(NS, labels, [BlockId(at) for at in range(8)], (DEVICE,) * 8)
    (event,) = chunks.read()
    assert (event["token_ids"], event["block_size"]) == (tokens, 8)
    assert chunks.reader.held[DEVICE] == {hash_of(NS, list(labels)[:end]) for end in (4, 8)}


def test_a_chunk_is_in_a_tier_while_all_its_blocks_are() -> None:
    blocks, chunks = [BlockId(at) for at in range(8)], Chunks()
    labels = grid_labels(range(100, 116), 2, 8)
    first, second = (hash_of(NS, list(labels)[:end]) for end in (4, 8))
    chunks.log.prompt(NS, labels, blocks, (DEVICE,) * 8)
    chunks.log.moved(HOST, blocks[:6], False)
    chunks.read()
    assert chunks.reader.held[HOST] == {first}
    chunks.log.moved(HOST, blocks[6:], False)
    chunks.log.moved(HOST, blocks[3:4], True)
    chunks.log.moved(HOST, blocks[2:3], True)
    chunks.read()
    assert chunks.reader.held == {DEVICE: {first, second}, HOST: {second}, DISK: set()}


def test_prompts_that_part_within_a_chunk_are_two_blocks() -> None:
    """A reader names blocks by their tokens: it can't tell the common beginnings apart."""
    chunks = Chunks()
    alike, other = ([*range(100, 104), *ends] for ends in (range(104, 108), range(4)))
    for prompt, first in ((alike, 0), (other, 4)):
        blocks = [BlockId(at) for at in range(first, first + 4)]
        chunks.log.prompt(NS, grid_labels(prompt, 2, 8), blocks, (DEVICE,) * 4)
    chunks.log.moved(DEVICE, [BlockId(0)], True)
    chunks.read()
    assert chunks.reader.held[DEVICE] == {hash_of(NS, list(grid_labels(other, 2, 8)))}


def test_events_have_the_salt_of_their_prompt() -> None:
    log, events = BlockLog(), BlockEvents([DEVICE, HOST], [], BLOCK_SIZE)
    blocks = [BlockId(at) for at in range(4)]
    log.name(NS, "tenant")
    log.prompt(NS, token_labels(A, BLOCK_SIZE), blocks, (DEVICE,) * 4)
    log.moved(HOST, blocks[1:], False)
    first, others = events.of(log.take()[0])
    assert first["cache_salt"] == others["cache_salt"] == "tenant"
    assert first["extra_keys"] == [["tenant"], None, None, None]
    assert others["extra_keys"] is None, "vLLM's has it with a prompt's first block only"


def test_a_prompt_whose_salt_is_forgotten_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_events, "MAX_SALTS", 2)
    log = BlockLog()
    for at in range(3):
        log.name(bytes([at]), f"tenant-{at}")
    for at in range(3):
        log.prompt(bytes([at]), token_labels(A, BLOCK_SIZE), [BlockId(at)], (DEVICE,))
    assert [change.salt for change in log.take()[0]] == ["tenant-1", "tenant-2"]  # type: ignore[union-attr]


def test_a_number_that_is_used_again_is_another_block() -> None:
    log, reader, events = block_log(), Reader(), BlockEvents([DEVICE, HOST], [], BLOCK_SIZE)
    again = BlockId(1 << 32)
    log.prompt(NS, token_labels(A, BLOCK_SIZE), [BlockId(0)], (DEVICE,))
    log.moved(DEVICE, [BlockId(0)], True)
    log.moved(HOST, [again], False)
    log.prompt(NS, token_labels(B, BLOCK_SIZE), [again], (DEVICE,))
    reader.read(events.of(log.take()[0]))
    expected = {hash_of(NS, token_labels(B, BLOCK_SIZE)[:1])}
    assert reader.held == {DEVICE: expected, HOST: expected, DISK: set()}


def test_a_log_that_nobody_reads_stays_small_and_readers_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_events, "MAX_BLOCKS", 8)
    harness = ToldHarness()
    for _ in range(3):
        harness.serve(A)
        harness.serve(B)
        harness.lose_the_device()
    assert harness.events is not None
    assert harness.events._num_put - harness.events._num_taken <= 8
    harness.listen()
    assert not harness.reader.ever
    monkeypatch.undo()
    harness.serve(A)
    harness.listen()
    labels = token_labels(A, BLOCK_SIZE)
    assert harness.reader.held[DEVICE] == {
        hash_of(NS, labels[: at + 1]) for at in range(len(labels))
    }
    harness.close()


def test_what_is_too_old_is_told_without_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_events, "MAX_RECENT", 2)
    events = BlockEvents([DEVICE, HOST], [], BLOCK_SIZE)
    log, blocks = block_log(), [BlockId(at) for at in range(4)]
    log.prompt(NS, token_labels(A, BLOCK_SIZE), blocks, (DEVICE,) * 4)
    log.moved(HOST, blocks, False)
    told = list(events.of(log.take()[0]))
    assert [len(event["block_hashes"]) for event in told] == [4, 2, 2]  # type: ignore[arg-type]
    assert [event["block_size"] for event in told] == [BLOCK_SIZE, BLOCK_SIZE, 0]
    assert told[0]["block_hashes"] == [*told[2]["block_hashes"], *told[1]["block_hashes"]]  # type: ignore[misc]


def test_most_of_what_is_asked_twice_costs_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing a known prompt again neither hashes nor reads its tokens."""
    labels = token_labels(np.arange(2000), BLOCK_SIZE)
    blocks = [BlockId(at) for at in range(len(labels))]
    events, log = BlockEvents([DEVICE, HOST], [], BLOCK_SIZE), block_log()
    for _ in range(2):
        log.prompt(NS, labels, blocks, (DEVICE,) * len(blocks))
    first, second = log.take()[0]
    assert len(list(events.of([first]))) == 1
    monkeypatch.setattr(block_events, "_hash", None)
    monkeypatch.setattr(type(labels), "__getitem__", None)
    assert list(events.of([second])) == []
