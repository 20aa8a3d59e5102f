"""The batched copy: one suite for the native core and its Python twin."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core import hot
from kvtier.core.reference.copy import copy_batch as reference_copy_batch
from tests.native.twins import both

CopyBatch = Callable[..., int]
Words = npt.NDArray[np.uint64]

GUARD = 64  # bytes around every fragment that nothing may touch
MIB = 1 << 20


copy_batch = both(reference_copy_batch, "copy_batch")


def words(*values: int) -> Words:
    return np.array(values, np.uint64)


@dataclass
class Arena:
    """Guarded fragments in two buffers.

    starts: int64 [2, num_fragments], where each begins in ``dst`` and in ``src``.
    """

    dst: npt.NDArray[np.uint8]
    src: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    sizes: list[int]

    @property
    def batch(self) -> tuple[Words, Words, Words]:
        """Return the three arguments of a copy."""
        return (
            (self.starts[0] + self.dst.ctypes.data).astype(np.uint64),
            (self.starts[1] + self.src.ctypes.data).astype(np.uint64),
            np.array(self.sizes, np.uint64),
        )

    def expected(self) -> npt.NDArray[np.uint8]:
        """Return what ``dst``, as it is now, must hold after the copy."""
        result = self.dst.copy()
        for to, at, size in zip(*self.starts.tolist(), self.sizes, strict=True):
            result[to : to + size] = self.src[at : at + size]
        return result


def make_arena(sizes: list[int], gaps: list[int], seed: int) -> Arena:
    """Random bytes, and fragments of ``sizes`` bytes in another random order on either side.

    Before fragment i lie ``GUARD + gaps[i]`` bytes, so that fragments are aligned in every way.
    """
    rng = np.random.default_rng(seed)
    starts = np.zeros((2, len(sizes)), np.int64)
    end = 0
    for side in starts:
        end = 0
        for i in rng.permutation(len(sizes)):
            side[i] = end + GUARD + gaps[i]
            end = side[i] + sizes[i]
    dst, src = (rng.integers(0, 256, end + GUARD, np.uint8) for _ in range(2))
    return Arena(dst, src, starts, sizes)


@st.composite
def arenas(draw: st.DrawFn) -> Arena:
    """Few or many fragments, tiny, short and long; sometimes one that is split into parts."""
    size = st.one_of(
        st.integers(0, 700),
        st.sampled_from([0, 1, 63, 64, 255, 256, 257, 2048, 4095, 4096, 18432, 32768]),
        st.integers(0, 300_000),
    )
    sizes = draw(st.lists(size, max_size=40))
    sizes += draw(st.lists(st.integers(MIB, 4 * MIB), max_size=2))
    gaps = [draw(st.integers(0, 130)) for _ in sizes]
    return make_arena(sizes, gaps, draw(st.integers(0, 2**32 - 1)))


@given(arena=arenas(), threads=st.integers(1, 5))
def test_named_bytes_are_copied_and_no_others_are_touched(
    copy_batch: CopyBatch, arena: Arena, threads: int
) -> None:
    src, expected = arena.src.copy(), arena.expected()
    assert copy_batch(*arena.batch, threads) == sum(arena.sizes)
    np.testing.assert_array_equal(arena.dst, expected)
    np.testing.assert_array_equal(arena.src, src)


@pytest.mark.parametrize("fragment", [1024, 2048, 16384, 256 * 1024])
def test_large_batches_arrive_on_every_path(copy_batch: CopyBatch, fragment: int) -> None:
    # Enough parts for the core to time both of its ways to copy, and then to use the faster one.
    num_fragments = 24 * MIB // fragment
    arena = make_arena([fragment] * num_fragments, [3] * num_fragments, seed=7)
    for threads in (1, 3):
        arena.dst[:] = 0
        expected = arena.expected()
        copy_batch(*arena.batch, threads)
        assert np.array_equal(arena.dst, expected)


def test_several_threads_may_copy_at_once(copy_batch: CopyBatch) -> None:
    arenas = [make_arena([40_000] * 120, [11] * 120, seed) for seed in range(4)]
    copied = [0] * len(arenas)

    def copy(i: int) -> None:
        copied[i] = copy_batch(*arenas[i].batch, 3)

    callers = [threading.Thread(target=copy, args=(i,)) for i in range(len(arenas))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for arena, num_bytes in zip(arenas, copied, strict=True):
        assert num_bytes == sum(arena.sizes)
        assert np.array_equal(arena.dst, arena.expected())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_copies_with_threads_of_its_own(copy_batch: CopyBatch) -> None:
    arena = make_arena([64 * 1024] * 64, [5] * 64, seed=1)
    copy_batch(*arena.batch, 2)  # starts the parent's workers, which a child does not get
    arena.dst[:] = 0
    expected = arena.expected()
    child = os.fork()
    if child == 0:
        copy_batch(*arena.batch, 2)
        os._exit(0 if np.array_equal(arena.dst, expected) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_empty_batches_copy_nothing(copy_batch: CopyBatch) -> None:
    assert copy_batch(words(), words(), words()) == 0
    # Nothing is read from or written to the address of an empty fragment.
    assert copy_batch(words(0, 8), words(0, 16), words(0, 0), threads=4) == 0


def test_arguments_may_be_named(copy_batch: CopyBatch) -> None:
    arena = make_arena([100, 200], [0, 7], seed=3)
    dst, src, size = arena.batch
    assert copy_batch(size=size, src=src, dst=dst, threads=2) == 300
    assert np.array_equal(arena.dst, arena.expected())


def test_read_only_lists_are_accepted(copy_batch: CopyBatch) -> None:
    batch = make_arena([100], [0], seed=4).batch
    for array in batch:
        array.flags.writeable = False
    assert copy_batch(*batch) == 100


@pytest.mark.parametrize("position", range(3), ids=["dst", "src", "size"])
@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        pytest.param([1], TypeError, "must be an array of uint64, not list", id="list"),
        pytest.param(None, TypeError, "must be an array of uint64, not NoneType", id="none"),
        pytest.param(np.ones(1, np.int64), TypeError, "format 'l'", id="int64"),
        pytest.param(np.ones(1, np.uint32), TypeError, "format 'I'", id="uint32"),
        pytest.param(np.ones(1, np.float64), TypeError, "format 'd'", id="float64"),
        pytest.param(np.ones(1, ">u8"), TypeError, "format '>", id="byte-swapped"),
        pytest.param(np.ones((1, 1), np.uint64), ValueError, "one dimension, not 2", id="2d"),
        pytest.param(np.ones((), np.uint64), ValueError, "one dimension, not 0", id="0d"),
        pytest.param(np.ones(4, np.uint64)[::2], ValueError, "C-contiguous", id="strided"),
        pytest.param(np.ones(2, np.uint64), ValueError, "equal lengths", id="longer"),
    ],
)
def test_bad_lists_are_refused_by_name(
    copy_batch: CopyBatch, position: int, bad: object, error: type[Exception], text: str
) -> None:
    batch: list[object] = [words(0), words(0), words(0)]
    batch[position] = bad
    with pytest.raises(error, match=text) as raised:
        copy_batch(*batch)
    assert ("dst", "src", "size")[position] in str(raised.value)


@pytest.mark.parametrize("threads", [0, -1, 257, 1 << 40])
def test_thread_counts_outside_the_range_are_refused(copy_batch: CopyBatch, threads: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and 256, not {threads}"):
        copy_batch(words(), words(), words(), threads)


def test_a_thread_count_is_a_whole_number(copy_batch: CopyBatch) -> None:
    with pytest.raises(TypeError):
        copy_batch(words(), words(), words(), 1.5)


@pytest.mark.parametrize(
    ("dst", "src", "size", "text"),
    [
        pytest.param(0, 4096, 8, r"dst\[1\]: 8 bytes at address 0 ", id="no destination"),
        pytest.param(4096, 0, 8, r"src\[1\]: 8 bytes at address 0 ", id="no source"),
        pytest.param(4096, 8192, 2**64 - 8, r"dst\[1\]: 184\d+ bytes at address 4096", id="size"),
        pytest.param(2**64 - 4, 8192, 8, r"dst\[1\]: 8 bytes at address 184\d+", id="address"),
    ],
)
def test_fragments_outside_memory_are_refused_before_any_copy(
    copy_batch: CopyBatch, dst: int, src: int, size: int, text: str
) -> None:
    arena = make_arena([100], [0], seed=5)
    before = arena.dst.copy()
    second = (dst, src, size)
    batch = [np.append(array, words(x)) for array, x in zip(arena.batch, second, strict=True)]
    with pytest.raises(ValueError, match=text):
        copy_batch(*batch)
    np.testing.assert_array_equal(arena.dst, before)


@pytest.fixture
def reloaded_hot(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Run a fresh copy of ``core.hot`` with KVTIER_NATIVE set; the real one is untouched."""
    import importlib.util

    def load(setting: str) -> Any:
        monkeypatch.setenv("KVTIER_NATIVE", setting)
        spec = importlib.util.spec_from_file_location("fresh_hot", hot.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_the_environment_switches_the_core_off(reloaded_hot: Callable[[str], Any]) -> None:
    module = reloaded_hot("off")
    assert module.NATIVE is False
    assert "KVTIER_NATIVE=off" in module.NATIVE_REASON
    assert module.copy_batch is reference_copy_batch


def test_an_unknown_setting_is_refused(reloaded_hot: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="KVTIER_NATIVE='fast'.*auto, on or off"):
        reloaded_hot("fast")


def test_a_reason_is_given_if_and_only_if_the_core_is_not_used() -> None:
    assert bool(hot.NATIVE_REASON) != hot.NATIVE


@pytest.mark.skipif(
    os.environ.get("KVTIER_REQUIRE_NATIVE") != "1", reason="no compiler: the core is optional"
)
def test_the_native_core_is_built_where_a_compiler_is() -> None:
    import kvtier._native

    assert kvtier._native.copy_batch is not None
