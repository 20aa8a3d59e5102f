"""Capacity: slots in use, evictions, and requests for evicted blocks."""

from __future__ import annotations

from kvtier.tools.dashboard.panels import Panel, PanelRow, Query, Unit
from kvtier.tools.dashboard.rows.common import NOW, QUANTILES, TOO_FEW, quantiles

ROOM = PanelRow(
    "Capacity",
    (
        Panel(
            "Capacity in use",
            "Bytes in use of each tier, and its size.",
            Unit.BYTES,
            tuple(
                Query(
                    f"{NOW.level(slots, 'tier')} * {NOW.highest('kvtier_slot_bytes', 'tier')}",
                    f"{engine}{{{{tier}}}} {what}",
                )
                for engine, names in (
                    ("", ("kvtier_used_slots", "kvtier_slots")),
                    ("vLLM ", ("vllm:kvtier_used_chunks", "vllm:kvtier_chunks")),
                )
                for slots, what in zip(names, ("in use", "size"), strict=True)
            ),
        ),
        Panel(
            "Fill",
            "Share of a tier in use. A full tier is normal: watch the blocks that are requested "
            "again after eviction.",
            Unit.SHARE,
            (
                Query(
                    f"{NOW.level('kvtier_used_slots', 'tier')} / "
                    f"({NOW.level('kvtier_slots', 'tier')} > 0)",
                    "{{tier}}",
                ),
                Query(
                    f"{NOW.level('vllm:kvtier_used_chunks', 'tier')} / "
                    f"({NOW.level('vllm:kvtier_chunks', 'tier')} > 0)",
                    "vLLM {{tier}}",
                ),
                Query(NOW.highest("vllm:kv_cache_usage_perc"), "vLLM device"),
                Query(
                    f"{NOW.level('sglang:hicache_host_used_tokens')} / "
                    f"({NOW.level('sglang:hicache_host_total_tokens')} > 0)",
                    "SGLang host",
                ),
                Query(NOW.highest("sglang:token_usage"), "SGLang device"),
            ),
            highest=1,
        ),
        Panel(
            "Evicted",
            "Blocks evicted (tokens under SGLang).",
            Unit.PER_S,
            (
                Query(NOW.rate("kvtier_evicted_blocks_total", "tier"), "{{tier}}"),
                Query(NOW.rate("vllm:kvtier_evicted_chunks_total", "tier"), "vLLM {{tier}}"),
                Query(NOW.rate("sglang:evicted_tokens_total"), "SGLang device, tokens"),
            ),
        ),
        Panel(
            "Requested again after eviction",
            "Blocks that a larger tier would still have had. If they are many beside those "
            "evicted, kvtier replay says what more memory is worth.",
            Unit.PER_S,
            (Query(NOW.rate("kvtier_returned_blocks_total", "tier"), "{{tier}}"),),
        ),
        Panel(
            "Time from eviction to the next request",
            f"How much longer a tier would have to hold blocks to serve them. {QUANTILES}",
            Unit.SECONDS,
            quantiles("kvtier_return_seconds", "tier", legend="{{tier}}"),
            without=TOO_FEW,
        ),
        Panel(
            "Refused or not written",
            "No room: every slot is held or in flight. Not written: evicted from memory before the "
            "write, or over the write budget.",
            Unit.PER_S,
            (
                Query(NOW.rate("kvtier_refused_blocks_total", "tier"), "no room, {{tier}}"),
                Query(NOW.rate("kvtier_unwritten_blocks_total", "tier"), "not written, {{tier}}"),
                Query(
                    NOW.rate("vllm:kvtier_not_demoted_chunks_total", "tier"),
                    "vLLM not written, {{tier}}",
                ),
                Query(
                    NOW.rate("vllm:kvtier_refused_chunks_total", "tier"), "vLLM no room, {{tier}}"
                ),
            ),
        ),
        Panel(
            "Not admitted",
            "Blocks that the policy did not admit.",
            Unit.PER_S,
            (Query(NOW.rate("kvtier_unadmitted_blocks_total", "tier"), "{{tier}}"),),
        ),
    ),
)
