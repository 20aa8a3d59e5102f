"""Invalid numbers are refused with a message: no crash, and no endless call."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.core import hot
from kvtier.core.keys import Labels
from kvtier.core.reference.copy import copy_batch as reference_copy_batch
from kvtier.core.types import DEVICE, HOST, Match, Slot
from kvtier.index import PromptIndex
from tests.index.indexes import INDEXES, make

ROOT = Path(__file__).parents[2]
HUGE = 2**63 - 1
Read = Callable[[float], list[int]]
needs_core = pytest.mark.skipif(not hot.NATIVE, reason=f"no native core: {hot.NATIVE_REASON}")


@needs_core
@pytest.mark.parametrize("seed", range(4))
def test_every_call_gives_a_result_or_an_error(seed: int) -> None:
    """The calls run in a process of their own, whose last line is the call that ended it."""
    command = [sys.executable, "-m", "tests.native.hostile", str(seed), "2000"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    last = "\n".join(done.stdout.splitlines()[-3:])
    assert done.returncode == 0, f"{' '.join(command[1:])}:\n{last}\n{done.stderr[-3000:]}"


@pytest.fixture(params=INDEXES)
def index(request: pytest.FixtureRequest) -> PromptIndex:
    return make(request.param, (DEVICE, HOST))


def insert(index: PromptIndex, *slots: int, now: float = 1.0) -> None:
    labels = [b"%d" % slot for slot in slots]
    index.insert(b"space", labels, DEVICE, [Slot(slot) for slot in slots], now)


@pytest.mark.parametrize(
    ("block_bytes", "blocks_per_chunk", "first", "num"),
    [
        (4, HUGE, HUGE, 4),
        (4, 1, HUGE, 4),
        (4, 1, 0, HUGE),
        (4, HUGE, 0, 4),
        (HUGE, 1, 1, 4),
        (4, 3, 0, 16),  # the last chunk is not whole
        (4, 1, -1, 2),
        (-4, 1, 0, 2),
        (0, 1, 0, 2),
        (4, 0, 0, 2),
    ],
)
@pytest.mark.parametrize("tokens", [bytes(64), np.zeros(16, np.int64)], ids=["bytes", "array"])
def test_labels_outside_of_their_tokens_are_refused(
    index: PromptIndex,
    tokens: bytes,
    block_bytes: int,
    blocks_per_chunk: int,
    first: int,
    num: int,
) -> None:
    labels = Labels(tokens, block_bytes, blocks_per_chunk, first, num)
    insert(index, 1)
    with pytest.raises(ValueError, match="Labels name blocks"):
        index.extend(b"1", labels)
    assert len(index) == 1


def test_labels_in_the_middle_of_a_token_are_refused(index: PromptIndex) -> None:
    with pytest.raises(ValueError, match="6 bytes a block are no whole number of token ids"):
        index.match(b"space", Labels(np.zeros(16, np.int64), 6, 1, 0, 2))


def test_message_about_labels_does_not_show_the_prompt(index: PromptIndex) -> None:
    with pytest.raises(ValueError, match="num=99 in 8 bytes") as caught:
        index.extend(b"space", Labels(b"password", 4, 1, 0, 99))
    assert "password" not in str(caught.value)


@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf])
def test_time_that_is_in_no_order_is_refused(index: PromptIndex, now: float) -> None:
    insert(index, 1, 2)
    blocks = list(index.match(b"space", [b"1", b"2"]).blocks)
    for change in (
        lambda: insert(index, 3, now=now),
        lambda: insert(index, 1, now=now),
        lambda: index.touch(blocks, now),
        lambda: index.commit([blocks[0]], DEVICE, now),
    ):
        with pytest.raises(ValueError, match=f"finite number of seconds, not {now}"):
            change()
    assert index.evict(DEVICE, 99) == blocks[::-1], "all of them can still be found and leave"
    index.check_invariants()


@pytest.mark.parametrize("slot", [-1, 2**32, 2**64, -(2**70)])
def test_what_is_no_slot_is_refused(index: PromptIndex, slot: int) -> None:
    insert(index, 1)
    with pytest.raises(ValueError, match=f"slot {slot} is not in 0 .. 2"):
        index.begin_write([index.match(b"space", [b"1"]).blocks[0]], HOST, [Slot(slot)])
    assert index.num_held(HOST) == 0
    index.check_invariants()


@pytest.mark.parametrize("num", [HUGE, 2**64, 2**200])
def test_more_than_all_is_all(index: PromptIndex, num: int) -> None:
    insert(index, 5, 6, 7)
    assert index.evict(DEVICE, -num) == []
    assert index.drop(DEVICE, num) == [7, 6, 5]


@pytest.mark.parametrize(
    "copy", [reference_copy_batch, pytest.param(hot.copy_batch, marks=needs_core)]
)
@pytest.mark.parametrize(
    ("addresses", "sizes"),
    [
        ([4096] * 5, [2**62] * 5),  # the sum is one that 64 bits do not hold
        ([2**63], [8]),
        ([2**64 - 4096], [8]),  # what -4096 becomes
        ([2**63 - 8], [9]),
    ],
)
def test_no_copy_reaches_beyond_memory(
    copy: object, addresses: list[int], sizes: list[int]
) -> None:
    where = np.array(addresses, np.uint64)
    with pytest.raises(ValueError, match="than there is memory|do not lie in memory"):
        copy(where, where, np.array(sizes, np.uint64))  # type: ignore[operator]


@needs_core
def test_index_is_not_made_of_what_it_is_not_made_of() -> None:
    assert hot.BlockTrie is not None
    states = (1, 2, 3, 4)
    for policies, match_type, words in (
        ((None,), Labels, "a policy must be a str, not NoneType"),
        (("lru",), 5, "match_type must be a class"),
        (("lru",), type, "match_type must be a class"),
    ):
        with pytest.raises(TypeError, match=words):
            hot.BlockTrie((DEVICE,), policies, states, Labels, match_type)  # type: ignore[arg-type]
    for num_tiers, num_policies in (33, 33), (0, 0), (2, 1):
        tiers, names = (DEVICE,) * num_tiers, ("lru",) * num_policies
        with pytest.raises(ValueError, match="1 to 32 tiers with a policy each"):
            hot.BlockTrie(tiers, names, states, Labels, Match)


@needs_core
def test_labels_may_ask_the_index_while_they_are_read() -> None:
    """Labels may be made by a generator that calls the index: the two calls do not interfere."""
    index = make("native", (DEVICE,))
    insert(index, 1, 2)

    def labels() -> object:
        for name in (b"1", b"2"):
            assert index.match(b"space", [b"1"]).num_blocks == 1
            insert(index, 7, 8, 9)
            yield name

    made = index.insert(b"space", labels(), DEVICE, [Slot(30), Slot(31)], 2.0)  # type: ignore[arg-type]
    assert (made.slots, made.num_new) == ([1, 2], 0)
    assert index.match(b"space", labels()).num_blocks == 2  # type: ignore[arg-type]
    index.check_invariants()


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Read]:
    """Read a file of 512 bytes through a ring, until a deadline; return the numbers of bytes."""
    if not hot.NATIVE:
        pytest.skip(f"no native core: {hot.NATIVE_REASON}")
    path, memory = tmp_path / "file", np.zeros(512, np.uint8)
    path.write_bytes(bytes(512))
    address = np.array([memory.ctypes.data], np.uint64)
    with path.open("rb") as file:
        try:
            ring = hot.UringRing(file.fileno(), 4, 4096, False)
        except RuntimeError as error:
            pytest.skip(str(error))
        batch = np.array([0]), address, np.array([512])
        yield lambda deadline_s: ring.transfer(False, *batch, deadline_s)[0].tolist()


@pytest.mark.parametrize("deadline_s", [math.inf, 1e300, 1e18])
def test_deadline_beyond_all_time_is_none(read: Read, deadline_s: float) -> None:
    assert read(deadline_s) == [512]


def test_deadline_that_is_no_number_is_refused(read: Read) -> None:
    with pytest.raises(ValueError, match="deadline_s must be a number of seconds or None, not nan"):
        read(math.nan)
