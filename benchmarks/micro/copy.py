"""D1, D2, D3: random blocks between a layer-first and a block-first pool, on the CPU.

    python -m benchmarks.micro.copy            a table
    python -m benchmarks.micro.copy --json -   JSON on stdout, the table on stderr

Every method moves the same blocks and is compared with one contiguous memcpy of as many bytes, by
as many threads, on the same kind of pages. See README.md for the method.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.micro.copy_plan import PlanRow, plan_targets, run_plan
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.report.targets import Bounds, bounds, estimate, judged
from kvtier.core import hot
from kvtier.core.reference.copy import copy_batch as reference_copy_batch
from kvtier.layout import (
    Attention,
    DType,
    KVGroup,
    Layout,
    Part,
    fragments,
    full_attention,
    named_layout,
)

BLOCK_SIZE = 16
UNTOUCHED = 0xAB  # every byte of the blocks that are not copied
CONTIGUOUS = "contiguous memcpy"
OURS = "copy_batch"
OURS_FLAT = "copy_batch, flat"
PLAN_ROUNDS = 500

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the target table."""

    target_id: str
    name: str
    group: KVGroup
    target: float


CASES = (
    Case("D1", "MHA, 28 layers", full_attention(28, 8, 128, DType.BFLOAT16, BLOCK_SIZE), 0.90),
    Case(
        "D2",
        "MLA, 61 layers",
        KVGroup(Attention.LATENT, 61, (Part("latent", 1, 576),), DType.BFLOAT16, BLOCK_SIZE),
        0.90,
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One method in one direction. Times in seconds, rates in bytes copied once per second."""

    case: str
    direction: str
    threads: int
    method: str
    median_s: float
    best_s: float
    worst_s: float
    gb_per_s: float
    ratio: float
    rounds: int
    ratio_between: Bounds


@dataclass(slots=True)
class Pool:
    """Blocks in one arrangement, in huge pages where the system grants them."""

    layout: Layout
    memory: Bytes
    blocks: npt.NDArray[np.int64]  # the named blocks, in the order they are copied
    block_axis: int

    @property
    def view(self) -> Bytes:
        """Memory as uint8 [num_layers * parts, num_blocks, n], or blocks first."""
        num_rows = self.layout.group.num_layers * len(self.layout.group.parts)
        shape = [num_rows, num_rows, self.layout.nbytes // num_rows // self.layout.num_blocks]
        shape[self.block_axis] = self.layout.num_blocks
        return self.memory.reshape(shape)

    def block(self, index: int) -> Bytes:
        """Return the bytes of one block, uint8 [num_layers * parts, n]."""
        return self.view[index] if self.block_axis == 0 else self.view[:, index]


def allocate(num_bytes: int) -> Bytes:
    """Allocate memory as the host tier does: anonymous, in huge pages if granted, all touched."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = UNTOUCHED
    return array


def make_pool(
    name: str, group: KVGroup, num_blocks: int, num_named: int, rng: np.random.Generator
) -> Pool:
    layout = named_layout(name, group, num_blocks)
    blocks = rng.permutation(num_blocks)[:num_named]
    return Pool(layout, allocate(layout.nbytes), blocks, 0 if name == "block_first" else 1)


def fill(pool: Pool, rng: np.random.Generator | None) -> None:
    """Fill the named blocks with random bytes, or with zeros."""
    for index in pool.blocks:
        block = pool.block(int(index))
        block[:] = 0 if rng is None else rng.integers(0, 256, block.shape, np.uint8)


def check(src: Pool, dst: Pool, method: str) -> None:
    """Check that all named blocks arrived, and that no other byte changed."""
    for at, to in zip(src.blocks, dst.blocks, strict=True):
        if not np.array_equal(dst.block(int(to)), src.block(int(at))):
            raise AssertionError(f"{method}: block {at} did not arrive in block {to}")
    for other in np.setdiff1d(np.arange(dst.layout.num_blocks), dst.blocks):
        if not (dst.block(int(other)) == UNTOUCHED).all():
            raise AssertionError(f"{method}: block {other} changed, and no copy names it")


def copy_list(src: Pool, dst: Pool) -> tuple[Words, Words, Words]:
    """Return addresses and sizes in the transfer engine's order, block by block."""
    pieces = fragments(src.layout, dst.layout)
    to = dst.memory.ctypes.data + pieces.dst_offset + dst.blocks[:, None] * pieces.dst_stride
    at = src.memory.ctypes.data + pieces.src_offset + src.blocks[:, None] * pieces.src_stride
    size = np.broadcast_to(pieces.size, at.shape)
    return (
        np.ascontiguousarray(to.ravel(), np.uint64),
        np.ascontiguousarray(at.ravel(), np.uint64),
        np.ascontiguousarray(size.ravel(), np.uint64),
    )


def contiguous(to: Bytes, at: Bytes, threads: int, pool: ThreadPoolExecutor) -> None:
    step = -(-len(at) // threads)
    starts = range(0, len(at), step)
    jobs = [
        pool.submit(
            ctypes.memmove,
            to.ctypes.data + start,
            at.ctypes.data + start,
            min(step, len(at) - start),
        )
        for start in starts[1:]
    ]
    ctypes.memmove(to.ctypes.data, at.ctypes.data, min(step, len(at)))
    for job in jobs:
        job.result()


def methods(
    src: Pool, dst: Pool, flat: tuple[Bytes, Bytes], threads: int, pool: ThreadPoolExecutor
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield name and call of the contestants of one direction and thread count."""
    words = copy_list(src, dst)
    flat_words = (
        np.array([flat[0].ctypes.data], np.uint64),
        np.array([flat[1].ctypes.data], np.uint64),
        np.array([len(flat[0])], np.uint64),
    )
    yield CONTIGUOUS, lambda: contiguous(flat[0], flat[1], threads, pool)
    if hot.NATIVE:
        yield OURS, lambda: hot.copy_batch(*words, threads)
        yield OURS_FLAT, lambda: hot.copy_batch(*flat_words, threads)
    if threads == 1:
        yield "Python twin", lambda: reference_copy_batch(*words)


def measure(
    case: Case, src: Pool, dst: Pool, direction: str, threads: int, rounds: int
) -> list[Row]:
    """Time all methods in turn, once per round.

    Before that, each runs once to warm up and to check the bytes.
    """
    num_bytes = len(src.blocks) * case.group.bytes_per_block
    flat = allocate(num_bytes), allocate(num_bytes)
    times: dict[str, list[float]] = {}
    with ThreadPoolExecutor(threads) as pool:
        contestants = list(methods(src, dst, flat, threads, pool))
        for name, copy in contestants:
            fill(dst, None)
            copy()
            if name not in (CONTIGUOUS, OURS_FLAT):
                check(src, dst, name)
            times[name] = []
        for _ in range(rounds):
            for name, copy in contestants:
                began = time.perf_counter()
                copy()
                times[name].append(time.perf_counter() - began)
    base = statistics.median(times[CONTIGUOUS])
    return [
        Row(
            case.target_id,
            direction,
            threads,
            name,
            median_s=(median := statistics.median(taken)),
            best_s=min(taken),
            worst_s=max(taken),
            gb_per_s=num_bytes / median / 1e9,
            ratio=base / median,
            rounds=len(taken),
            ratio_between=bounds(
                [whole / each for whole, each in zip(times[CONTIGUOUS], taken, strict=False)]
            ),
        )
        for name, taken in times.items()
    ]


def run_case(case: Case, num_named: int, thread_counts: tuple[int, ...], rounds: int) -> list[Row]:
    """Measure both directions.

    Pools are larger than the copied blocks, which lie in random order.
    """
    rng = np.random.default_rng(0)
    layers = make_pool("layer_first", case.group, 4 * num_named, num_named, rng)
    blocks = make_pool("block_first", case.group, num_named + num_named // 4, num_named, rng)
    rows: list[Row] = []
    for direction, src, dst in (("store", layers, blocks), ("load", blocks, layers)):
        fill(src, rng)
        for threads in thread_counts:
            rows += measure(case, src, dst, direction, threads, rounds)
    return rows


def targets(rows: list[Row]) -> list[dict[str, object]]:
    """Return the worst ratio of kvtier's copy per target, over directions and thread counts."""
    found: list[dict[str, object]] = []
    for case in CASES:
        ours = [row for row in rows if (row.case, row.method) == (case.target_id, OURS)]
        if ours:
            worst = min(ours, key=lambda row: row.ratio)
            ratio = estimate(worst.ratio, worst.ratio_between)
            found.append(judged(case.target_id, ratio, case.target, at_least=True))
    return found


def table(rows: list[Row]) -> Table:
    """Return a table with a section per case, direction and number of threads."""
    return table_of(
        "Copies of random blocks; ratio: time of contiguous memcpy / time; x2: two threads",
        ("case", "method"),
        ("ms", "best", "worst", "GB/s", "ratio"),
        (
            (
                f"{row.case} {row.direction} x{row.threads}",
                row.method,
                *(f"{1e3 * value:.1f}" for value in (row.median_s, row.best_s, row.worst_s)),
                f"{row.gb_per_s:.2f}",
                f"{row.ratio:.2f}",
            )
            for row in rows
        ),
        sections=1,
    )


def plan_table(rows: list[PlanRow]) -> Table:
    """Return a table with a line per direction and step."""
    return table_of(
        "D3: a copy of 256 blocks, before its first byte moves",
        ("case", "step"),
        ("copies", "median \u00b5s", "best", "worst"),
        (
            (
                f"D3 {row.direction}",
                row.step,
                f"{row.num_copies:,}",
                *(f"{value:.1f}" for value in (row.median_us, row.best_us, row.worst_us)),
            )
            for row in rows
        ),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("micro.copy", __doc__)
    parser.add_argument(
        "--case", choices=[*(case.target_id for case in CASES), "D3"], help="only this one"
    )
    parser.add_argument("--blocks", type=int, default=256, help="blocks copied at a time (256)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(1 2)")
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds (11)")
    options = parser.parse_args(arguments)

    machine = machine_facts()
    rows: list[Row] = []
    for case in CASES:
        if options.case in (None, case.target_id):
            rows += run_case(case, options.blocks, tuple(options.threads), options.rounds)
    plans = run_plan(PLAN_ROUNDS) if options.case in (None, "D3") else []
    judged_rows = targets(rows) + (plan_targets(plans) if plans else [])
    tables = ([table(rows)] if rows else []) + ([plan_table(plans)] if plans else [])
    report(options.json, "copy", machine, (*rows, *plans), judged_rows, *tables)


if __name__ == "__main__":
    main()
