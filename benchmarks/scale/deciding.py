"""N1, N2, N4: the deciding thread, under an engine that supplies keys."""

from __future__ import annotations

import gc
import json
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.report.targets import judged
from benchmarks.scale.keyed import PROMPT_BLOCKS, Harness, steps
from benchmarks.scale.part import Part, Row, exponent_in_turn, timed, timed_in_turn
from kvtier.tiers.memory.slots import SlotPool
from kvtier.tools.report.stats import exactly

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
QUICK_SIZES = (10_000, 100_000)
CALLS = 30
MAX_EXPONENT = 0.1
MAX_WAITING_S = 2e-3
MAX_SLOT_S = 5e-6
MAX_BYTES = 100
OURS = "kvtier"
ROOT = Path(__file__).parents[2]
VLLM = ROOT / ".peers" / "vllm" / "bin" / "python"


def measure(quick: bool) -> Part:
    sizes = QUICK_SIZES if quick else SIZES
    rows = _in_turn("take a slot, and give it back", {num: _slots(num) for num in sizes}, 10)
    harnesss = {num: Harness(num) for num in sizes}
    gc.collect()
    all_steps = {num: steps(harness) for num, harness in harnesss.items()}
    for name in all_steps[sizes[0]]:
        rows += _in_turn(name, {num: each[name] for num, each in all_steps.items()})
    rows += _held(harnesss)
    bytes_per_block = _memory(harnesss[sizes[-1]]) / sizes[-1]
    del harnesss, all_steps
    rows += (others := _under_vllm(sizes))
    targets = [*_growth(rows), _slot_target(rows), _waiting_target(others)]
    targets.append(judged("N4", exactly(bytes_per_block), MAX_BYTES, at_least=False))
    return Part(rows, [target for target in targets if target])


def _in_turn(name: str, calls: dict[int, Callable[[], object]], times: int = 1) -> list[Row]:
    for call in calls.values():
        call()  # the first one warms up
    timed = timed_in_turn(calls, times * CALLS)
    return [Row(name, OURS, "blocks", num, seconds) for num, seconds in timed.items()]


def _slots(num: int) -> Callable[[], None]:
    pool = SlotPool(num)

    def take() -> None:
        slots = pool.allocate(1)
        assert slots is not None
        pool.free(slots)

    return take


def _held(harnesss: dict[int, Harness]) -> list[Row]:
    """Measure stores while a tenth of all blocks is held.

    The held blocks are the next to be evicted, so other blocks have to be evicted instead.
    """
    orders = {num: _next_to_leave(harness, num // 10) for num, harness in harnesss.items()}
    for num, harness in harnesss.items():
        harness.cache.hold(orders[num])
    stores = {
        num: steps(harness)["store 64 blocks, 64 others leave"] for num, harness in harnesss.items()
    }
    first = "store 64 blocks, a tenth of all held: the first time"
    rows = [Row(first, OURS, "blocks", num, timed(store, 1)) for num, store in stores.items()]
    others = _in_turn("store 64 blocks, a tenth of all held", stores)
    for num, harness in harnesss.items():
        harness.cache.release(orders[num])
    return rows + others


def _next_to_leave(harness: Harness, num: int) -> list[bytes]:
    return harness.index.keys(harness.index.order(harness.cache.memory)[:num])


def _memory(harness: Harness) -> float:
    """Return the bytes of the index, and of all arrays with an item per slot."""
    beside = (harness.cache, harness.ladder._transfers.in_flight)
    arrays = [array for owner in beside for array in _arrays(vars(owner).values())]
    return float(harness.index.num_bytes + sum(array.nbytes for array in arrays))  # type: ignore[attr-defined]


def _arrays(values: Iterable[object]) -> Iterator[npt.NDArray[np.generic]]:
    for value in values:
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, dict):
            yield from _arrays(value.values())


def _under_vllm(sizes: tuple[int, ...]) -> list[Row]:
    """Measure vLLM's own manager, and waiting requests under kvtier; nothing without vLLM."""
    if not VLLM.exists():
        return []
    command = [str(VLLM), "-m", "benchmarks.scale.vllm_worker", *map(str, sizes)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [
        Row(load["operation"], load["contestant"], "blocks", load["num"], load["seconds"])
        for load in json.loads(done.stdout.splitlines()[-1])
    ]


def _growth(rows: list[Row]) -> list[dict[str, object]]:
    operations = dict.fromkeys(row.operation for row in rows if row.contestant == OURS)
    targets = []
    for operation in operations:
        of_it = [row for row in rows if row.operation == operation and row.contestant == OURS]
        if "first time" not in operation:
            grows = exponent_in_turn(of_it)
            targets.append(judged("N1", grows, MAX_EXPONENT, at_least=False, operation=operation))
    return targets


def _slot_target(rows: list[Row]) -> dict[str, object]:
    most = max((row for row in rows if "slot" in row.operation), key=lambda row: row.num)
    return judged("N2", most.estimate, MAX_SLOT_S, at_least=False, digits=9, blocks=most.num)


def _waiting_target(rows: list[Row]) -> dict[str, object]:
    waiting = [row for row in rows if "wait" in row.operation and row.contestant == OURS]
    if not waiting:
        return {}
    most = max(waiting, key=lambda row: row.num)
    what = {"operation": most.operation, "prompt_blocks": PROMPT_BLOCKS, "blocks": most.num}
    return judged("N1", most.estimate, MAX_WAITING_S, at_least=False, digits=6, **what)
