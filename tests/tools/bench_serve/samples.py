"""Hand-made results, for tests of the reports made from them."""

from __future__ import annotations

from dataclasses import replace

from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.serve.engine import EngineInfo
from kvtier.tools.bench_serve.accuracy import TIERS, AccuracyResult, AccuracyRow
from kvtier.tools.bench_serve.options import ServeOptions
from kvtier.tools.bench_serve.overhead import OverheadResult, OverheadRow, Turn
from kvtier.tools.bench_serve.overlap import Case, OverlapResult, OverlapRow
from kvtier.tools.bench_serve.result import ServeResult
from kvtier.tools.bench_serve.slow_disk import SlowDiskResult, SlowDiskRow
from kvtier.tools.bench_serve.store import StoreResult, StoreRow
from kvtier.tools.bench_serve.tamper import Damage
from kvtier.tools.bench_serve.ttft import TtftResult, TtftRow, served_from


def accuracy(
    num_prompts: int = 20, prompt_tokens: int = 3500, unequal: int = 0, unnoticed: int = 0
) -> AccuracyResult:
    """Return an accuracy result.

    unequal: prompts whose logits differ when served from host.
    unnoticed: prompts whose damaged value on the device stays unnoticed.
    """
    rows = tuple(
        AccuracyRow(
            prompt=prompt,
            tier=tier,
            reused=True,
            equal=not (tier == HOST and prompt < unequal),
            max_difference=0.0,
            noticed={
                damage: not (tier == DEVICE and damage is Damage.TOKEN and prompt < unnoticed)
                for damage in Damage
            },
        )
        for prompt in range(num_prompts)
        for tier in TIERS
    )
    return AccuracyResult(rows, prompt_tokens, num_prompts, prompt_tokens // 128 * 128, steps=32)


def ttft(
    cold_ms: float = 1000.0,
    device_ms: float = 25.0,
    host_ms: float = 40.0,
    disk_ms: float = 55.0,
    num_prompts: int = 100,
    prompt_tokens: int = 3500,
    from_device: int = 35,
    different: int = 0,
    slower: float = 1.0,
) -> TtftResult:
    """Return times to first token.

    different: requests of the second pass whose logits differ.
    slower: factor on the times of the prompts served from host, cold or not.
    """
    times = [slower if at < num_prompts - from_device else 1.0 for at in range(num_prompts)]
    rows = [
        TtftRow(1, at, at, "cold", {DEVICE: 0, HOST: 0}, cold_ms * times[at], None)
        for at in range(num_prompts)
    ]
    for order in range(num_prompts):
        on_device = order < from_device
        reused = prompt_tokens // 128 * 128
        hits = {DEVICE: reused if on_device else 0, HOST: 0 if on_device else reused}
        rows.append(
            TtftRow(
                turn=2,
                order=order,
                prompt=num_prompts - 1 - order,
                served_from=served_from(hits),
                hit_tokens=hits,
                ttft_ms=device_ms if on_device else host_ms * slower,
                same_logits=order >= different,
            )
        )
    hits = {DEVICE: 0, HOST: 0, DISK: prompt_tokens // 128 * 128}
    rows += [TtftRow(3, at, at, DISK, hits, disk_ms, True) for at in range(num_prompts)]
    return TtftResult(tuple(rows), prompt_tokens, from_device)


def overhead(
    ttft_ratio: float = 1.004,
    throughput_ratio: float = 0.998,
    num_pairs: int = 40,
    prompt_tokens: int = 3500,
) -> OverheadResult:
    rows = []
    for pair in range(num_pairs):
        spread = 1 + 0.0004 * (pair - (num_pairs - 1) / 2)
        on = Turn(1000 * ttft_ratio * spread, 2000 * throughput_ratio * spread, 3.0, 0)
        rows.append(OverheadRow(pair, on, Turn(1000.0, 2000.0, 3.0, 0)))
    return OverheadResult(tuple(rows), prompt_tokens)


def slow_disk(ratio: float = 1.01, num_prompts: int = 100) -> SlowDiskResult:
    """Return a slow-disk result. ratio: time to first token over the slow disk against cold."""
    rows = tuple(
        SlowDiskRow(at, ratio * (1000.0 + at), 1000.0 + at, 0) for at in range(num_prompts)
    )
    return SlowDiskResult(rows, 3500, prompt_bytes=20_000_000, bytes_per_s=10_000_000)


def overlap(
    followed_ms: float = 50.0, at_full_size: bool = True, same: bool = True
) -> OverlapResult:
    """Return seven rounds: 1,000 ms cold, 40 from the device, a load of 60, 100 if awaited."""
    times = {
        Case.COLD: 1000.0,
        Case.DEVICE: 40.0,
        Case.FOLLOWED: followed_ms,
        Case.AWAITED: 100.0,
    }
    rows = tuple(
        OverlapRow(turn, case, ttft_ms + turn, 60.0 if case is Case.AWAITED else 0.0, same)
        for turn in range(-3, 4)
        for case, ttft_ms in times.items()
    )
    return OverlapResult(rows, 16384, 1024, 2 << 30, at_full_size)


def store(
    num_prompts: int = 20, num_hits: int = 20, different: int = 0, lookup_ms: float | None = 1.5
) -> StoreResult:
    """Return prompts of 1,000 ms, and 50 from the store. different: those with other logits."""
    rows = tuple(
        StoreRow(
            prompt,
            1000.0 + prompt,
            50.0 if prompt < num_hits else 1010.0,
            3456 if prompt < num_hits else 0,
            prompt >= different,
        )
        for prompt in range(num_prompts)
    )
    lookups = 0 if lookup_ms is None else num_prompts
    return StoreResult(rows, 3500, "valkey://cache.example", 200 << 20, lookups, lookup_ms)


def serve_result(
    accuracy: AccuracyResult | None = None,
    ttft: TtftResult | None = None,
    overhead: OverheadResult | None = None,
    slow_disk: SlowDiskResult | None = None,
    overlap: OverlapResult | None = None,
    store: StoreResult | None = None,
    attention: str = "full",
) -> ServeResult:
    info = EngineInfo(
        model_name="sample-model",
        device="cpu",
        dtype="float32",
        attention=attention,
        vocab_size=4096,
        num_parameters=4_984_192,
        max_model_tokens=8192,
        num_device_blocks=3000,
        block_size=16,
        chunk_tokens=128,
        bytes_per_block=81920,
    )
    return ServeResult(
        options=ServeOptions(),
        info=info,
        machine={"cpu": "A processor <with brackets>", "cores": 2, "load_average": [0.5, 0.4, 0.3]},
        command="kvtier bench serve",
        started="2030-01-02T03:04:05+00:00",
        wall_s=321.0,
        text="some text",
        accuracy=accuracy and replace(accuracy, attention=attention),
        ttft=ttft,
        overhead=overhead,
        slow_disk=slow_disk,
        overlap=overlap,
        store=store,
    )
