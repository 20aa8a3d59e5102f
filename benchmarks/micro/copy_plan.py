"""D3: cost of a copy before its first byte moves; part of ``benchmarks.micro.copy``.

A copy has 256 random blocks of 28 layers, K and V, between a layer-first pool and a block-first
one: 14,336 fragments. *Planning* turns slots into addresses and sizes, and merges neighbours. The
worker plans a load when its turn comes, so planning a load is measured up to its first step.
*Submitting* hands the plan to the worker thread: the cost for the calling thread. A load is planned
and submitted in steps of one layer, as the cache does. The plan is checked against one that is made
fragment by fragment.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.report.targets import Bounds, bounds, estimate, judged
from kvtier.cache.transfer import Steps, TransferEngine, stage, stage_steps
from kvtier.core.errors import DeviceError
from kvtier.core.types import Slot
from kvtier.devices.base import CopyBatch, CopyQueue, Device, Direction, Fence, Finding, Memory
from kvtier.devices.synchronous import Passed, SynchronousQueue
from kvtier.layout import DType, full_attention, named_layout
from kvtier.tiers import MemoryTier

GROUP = full_attention(28, 8, 128, DType.BFLOAT16, 16)
NUM_BLOCKS = 256
PLAN_TARGET_US = 100.0
SUBMIT_TARGET_US = 20.0


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Microseconds per call."""

    case: str
    direction: str
    step: str
    num_copies: int
    median_us: float
    best_us: float
    worst_us: float
    rounds: int
    median_us_between: Bounds


class _Pool(MemoryTier):
    """A pool of addresses without memory, because nothing is copied."""

    def __init__(self, order: str, num_blocks: int, address: int) -> None:
        layout = named_layout(order, GROUP, num_blocks)
        super().__init__(order, Memory(address, layout.nbytes, "host", ()), layout)

    def close(self) -> None:
        """Nothing to release."""


class _NoDevice(Device):
    """A device that accepts every batch and copies nothing: only the path to it is measured."""

    name = "none"

    def __init__(self) -> None:
        self._queue = SynchronousQueue(_take)

    def queue(self, direction: Direction) -> CopyQueue:
        return self._queue

    def fence(self) -> Fence:
        return Passed()

    def page_lock(self, memory: Memory) -> bool:
        return False

    def unlock(self, memory: Memory) -> None:
        """Nothing was locked."""

    def findings(self) -> list[Finding]:
        return []


def _take(batch: CopyBatch) -> None:
    if not len(batch.size):
        raise DeviceError("an empty batch was handed on")


def _plan(
    way: Direction, src: _Pool, src_slots: list[Slot], dst: _Pool, dst_slots: list[Slot]
) -> Steps | Sequence[CopyBatch]:
    """Return the steps of a copy, planned as the cache does."""
    if way is Direction.LOAD:
        return stage_steps(src, src_slots, dst, dst_slots)
    return [stage(src, src_slots, dst, dst_slots)]


def run_plan(rounds: int) -> list[PlanRow]:
    """Measure planning and submitting, in both directions."""
    rng = np.random.default_rng(0)
    layers, blocks = _Pool("layer_first", 4 * NUM_BLOCKS, 0), _Pool("block_first", 320, 1 << 44)
    slots = {
        pool.name: [Slot(each) for each in rng.permutation(pool.num_slots)[:NUM_BLOCKS].tolist()]
        for pool in (layers, blocks)
    }
    rows = []
    engine = TransferEngine(_NoDevice())
    for way, src, dst in (("store", layers, blocks), ("load", blocks, layers)):
        direction = Direction(way)
        args = src, slots[src.name], dst, slots[dst.name]
        steps = _plan(direction, *args)
        _check(steps, *args)
        plan_us, submit_us = list[float](), list[float]()
        for _ in range(rounds):
            began = time.perf_counter()
            next(iter(_plan(direction, *args)))
            plan_us.append(1e6 * (time.perf_counter() - began))
        for _ in range(rounds):
            began = time.perf_counter()
            job = engine.submit(steps, direction)
            submit_us.append(1e6 * (time.perf_counter() - began))
            assert job.wait(60)
            assert job.succeeded
        for step, taken in (("plan", plan_us), ("submit", submit_us)):
            rows.append(
                PlanRow(
                    "D3",
                    way,
                    step,
                    sum(len(batch.size) for batch in steps),
                    statistics.median(taken),
                    min(taken),
                    max(taken),
                    rounds,
                    bounds(taken),
                )
            )
    engine.close()
    return rows


def plan_targets(rows: list[PlanRow]) -> list[dict[str, object]]:
    """Return D3 for the slower direction of each step."""
    found: list[dict[str, object]] = []
    for step, target in (("plan", PLAN_TARGET_US), ("submit", SUBMIT_TARGET_US)):
        slower = max((row for row in rows if row.step == step), key=lambda row: row.median_us)
        value = estimate(slower.median_us, slower.median_us_between)
        what = f"{step}, microseconds"
        found.append(judged("D3", value, target, at_least=False, digits=1, what=what))
    return found


def _check(
    steps: Sequence[CopyBatch],
    src: _Pool,
    src_slots: list[Slot],
    dst: _Pool,
    dst_slots: list[Slot],
) -> None:
    """Compare every fragment with the layouts. Raises SystemExit if one is wrong."""
    expected = set()
    token_bytes = GROUP.parts[0].num_heads * GROUP.parts[0].dim * GROUP.dtype.itemsize
    run = GROUP.block_size * token_bytes
    for at, to in zip(src_slots, dst_slots, strict=True):
        for index in range(len(GROUP.parts)):
            one, other = src.layout.parts[index], dst.layout.parts[index]
            for layer in range(GROUP.num_layers):
                expected.add(
                    (
                        one.offset + at * one.block + layer * one.layer,
                        other.offset + to * other.block + layer * other.layer,
                        run,
                    )
                )
    found = set()
    for batch in steps:
        columns = (batch.src_offset.tolist(), batch.dst_offset.tolist(), batch.size.tolist())
        found |= set(zip(*columns, strict=True))
    if found != expected:
        raise SystemExit("the plan of D3 is wrong: bytes would go astray")
