"""N1, N2, N4: the deciding thread, under an engine that brings keys."""

from __future__ import annotations

import gc
import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.scale.keyed import PROMPT_BLOCKS, World, steps
from benchmarks.scale.part import Part, Row, exponent, timed
from benchmarks.targets import judged
from kvtier.serve_bench.stats import exactly
from kvtier.tiers.slots import SlotPool

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
QUICK_SIZES = (10_000, 100_000)
CALLS = 30
MOST_EXPONENT = 0.1
MOST_WAITING_S = 2e-3
MOST_SLOT_S = 5e-6
MOST_BYTES = 100
OURS = "kvtier"
ROOT = Path(__file__).parents[2]
PAGE, PROMPT_TOKENS = 16, 1024
GROUP_BLOCKS = 32 + 100 * 32
"""Of 100 prompts that share their first half."""
SGLANG_PHASES = {"hit": "look up a prompt of 64 blocks", "evict": "evict 512 blocks"}
SGLANG = ROOT / ".peers" / "sglang" / "bin" / "python"
VLLM = ROOT / ".peers" / "vllm" / "bin" / "python"


def measure(quick: bool) -> Part:
    rows: list[Row] = []
    sizes = QUICK_SIZES if quick else SIZES
    bytes_per_block = 0.0
    for num in sizes:
        rows += _slots(num)
        world = World(num)
        gc.collect()
        for name, step in steps(world).items():
            step()  # the first one warms up
            rows.append(Row(name, OURS, "blocks", num, timed(step, CALLS)))
        rows += _held(world, num)
        bytes_per_block = _memory(world) / num
        del world
    rows += (others := _under_vllm(sizes))
    rows += [row for num in sizes[:3] for row in _sglang(num)]  # larger trees do not fit
    targets = [*_growth(rows), _slot_target(rows), _waiting_target(others)]
    targets.append(judged("N4", exactly(bytes_per_block), MOST_BYTES, at_least=False))
    return Part(rows, [target for target in targets if target])


def _slots(num: int) -> list[Row]:
    pool = SlotPool(num)

    def take() -> None:
        slots = pool.allocate(1)
        assert slots is not None
        pool.free(slots)

    return [Row("take a slot, and give it back", OURS, "blocks", num, timed(take, 10 * CALLS))]


def _held(world: World, num: int) -> list[Row]:
    """A tenth of all blocks, the next to leave, is held: others leave for those that come."""
    order = world.index.keys(world.index.order(world.cache.memory)[: num // 10])
    world.cache.hold(order)
    store = steps(world)["store 64 blocks, 64 others leave"]
    first = timed(store, 1)
    after = timed(store, CALLS)
    world.cache.release(order)
    return [
        Row("store 64 blocks, a tenth of all held: the first time", OURS, "blocks", num, first),
        Row("store 64 blocks, a tenth of all held", OURS, "blocks", num, after),
    ]


def _memory(world: World) -> float:
    """Of the index, and of all arrays beside it that have an item for every slot. Bytes."""
    beside = (world.cache, world.ladder._traffic._under_way)
    arrays = [array for owner in beside for array in _arrays(vars(owner).values())]
    return float(world.index.num_bytes + sum(array.nbytes for array in arrays))  # type: ignore[attr-defined]


def _arrays(values: Iterable[object]) -> Iterator[npt.NDArray[np.generic]]:
    for value in values:
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, dict):
            yield from _arrays(value.values())


def _under_vllm(sizes: tuple[int, ...]) -> list[Row]:
    """vLLM's own manager, and requests that wait under ours; nothing where vLLM is not there."""
    if not VLLM.exists():
        return []
    command = [str(VLLM), "-m", "benchmarks.scale.vllm_worker", *map(str, sizes)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [
        Row(each["operation"], each["contestant"], "blocks", each["num"], each["seconds"])
        for each in json.loads(done.stdout.splitlines()[-1])
    ]


def _sglang(num: int) -> list[Row]:
    """SGLang's tree of as many blocks, with its Rust core; nothing where it is not there."""
    if not SGLANG.exists():
        return []
    num_prompts = 100 * round(num / GROUP_BLOCKS)
    arguments = {"index": "sglang rust", "num": num_prompts, "length": PROMPT_TOKENS, "page": PAGE}
    command = [str(SGLANG), "-m", "benchmarks.index_worker"]
    command += [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    asked = [{"phase": "insert", "start": 0, "stop": num_prompts}]
    asked += [{"phase": phase, "start": 0, "stop": CALLS} for phase in SGLANG_PHASES]
    lines = "".join(json.dumps(each) + "\n" for each in asked)
    done = subprocess.run(
        command, cwd=ROOT, input=lines, check=True, capture_output=True, text=True
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()[2:]]
    return [
        Row(name, "SGLang", "blocks", num, [1e-6 * each for each in answer["us"]])
        for name, answer in zip(SGLANG_PHASES.values(), answers, strict=True)
    ]


def _growth(rows: list[Row]) -> list[dict[str, object]]:
    operations = dict.fromkeys(row.operation for row in rows if row.contestant == OURS)
    targets = []
    for operation in operations:
        of_it = [row for row in rows if row.operation == operation and row.contestant == OURS]
        if "first time" not in operation:
            grows = exponent(of_it)
            targets.append(judged("N1", grows, MOST_EXPONENT, at_least=False, operation=operation))
    return targets


def _slot_target(rows: list[Row]) -> dict[str, object]:
    most = max((row for row in rows if "slot" in row.operation), key=lambda row: row.num)
    return judged("N2", most.estimate, MOST_SLOT_S, at_least=False, digits=9, blocks=most.num)


def _waiting_target(rows: list[Row]) -> dict[str, object]:
    waiting = [row for row in rows if "wait" in row.operation and row.contestant == OURS]
    if not waiting:
        return {}
    most = max(waiting, key=lambda row: row.num)
    what = {"operation": most.operation, "prompt_blocks": PROMPT_BLOCKS, "blocks": most.num}
    return judged("N1", most.estimate, MOST_WAITING_S, at_least=False, digits=6, **what)
