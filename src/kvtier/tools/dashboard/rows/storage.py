"""Copies and storage: bytes, times, failures."""

from __future__ import annotations

from kvtier.tools.dashboard.panels import Panel, PanelKind, PanelRow, Query, Unit
from kvtier.tools.dashboard.rows.common import LATELY, NOW, QUANTILES, SHOWN, TOO_FEW, quantiles

STORAGE = PanelRow(
    "Copies and storage",
    (
        Panel(
            "Transfer rate by route",
            "Bytes copied per second, by source and destination.",
            Unit.BYTES_PER_S,
            (
                Query(NOW.rate("kvtier_copied_bytes_total", "src", "dst"), "{{src}} to {{dst}}"),
                Query(
                    NOW.rate("vllm:kvtier_moved_bytes_total", "src", "dst"),
                    "vLLM {{src}} to {{dst}}",
                ),
                Query(NOW.rate("vllm:kv_offload_load_bytes_total"), "vLLM host to device"),
                Query(NOW.rate("vllm:kv_offload_store_bytes_total"), "vLLM device to host"),
            ),
        ),
        Panel(
            "Copy time",
            f"Duration of one copy job, which may hold many blocks. {QUANTILES}",
            Unit.SECONDS,
            quantiles("kvtier_copy_seconds", "src", "dst", legend="{{src}} to {{dst}}"),
            without=TOO_FEW,
        ),
        Panel(
            "Transfer rate while copying",
            "Bytes divided by transfer time, without queueing.",
            Unit.BYTES_PER_S,
            (
                Query(
                    f"{LATELY.rate('vllm:kvtier_moved_bytes_total', 'src', 'dst')} / "
                    f"({LATELY.rate('vllm:kvtier_moved_seconds_total', 'src', 'dst')} > 0)",
                    "vLLM {{src}} to {{dst}}",
                ),
                Query(f"1e9 * {LATELY.mean('sglang:prefetch_bandwidth')}", "SGLang reads"),
                Query(f"1e9 * {LATELY.mean('sglang:backup_bandwidth')}", "SGLang writes"),
            ),
            without="nothing moved in this window",
        ),
        Panel(
            "Look-ups",
            f"Duration of one look-up in a store. {QUANTILES}",
            Unit.SECONDS,
            quantiles("kvtier_lookup_seconds", "tier", legend="{{tier}}"),
            without=TOO_FEW,
        ),
        Panel(
            "Failed",
            "Failed copies and blocks. Each block was recomputed. Many on one route: check that "
            "disk or store.",
            Unit.PER_S,
            (
                Query(
                    NOW.rate("kvtier_failed_copies_total", "src", "dst"),
                    "copies {{src}} to {{dst}}",
                ),
                Query(
                    NOW.rate("kvtier_failed_blocks_total", "src", "dst"),
                    "blocks {{src}} to {{dst}}",
                ),
                Query(
                    NOW.rate("vllm:kvtier_failed_chunks_total", "src", "dst"),
                    "vLLM blocks {{src}} to {{dst}}",
                ),
            ),
        ),
        Panel(
            "Damaged blocks",
            "Blocks whose checksum or record did not match, in the time shown. None was used. If "
            "there are any, run kvtier verify: the disk may be failing.",
            Unit.NUMBER,
            (
                Query(SHOWN.grown("kvtier_damaged_blocks_total", "tier"), "{{tier}}"),
                Query(SHOWN.grown("vllm:kvtier_damaged_chunks_total", "tier"), "vLLM {{tier}}"),
            ),
            PanelKind.NUMBER,
            width=4,
            without="none",
            bad_from=1,
        ),
        Panel(
            "Verified in the background",
            "Bytes scrubbed per second while storage is idle.",
            Unit.BYTES_PER_S,
            (Query(NOW.rate("kvtier_scrubbed_bytes_total", "tier"), "{{tier}}"),),
            width=4,
        ),
        Panel(
            "State of storage",
            "A tier that fails several times in a row is paused, then retried. A slab that is cut "
            "short while in use stays marked until its data file has its length back.",
            Unit.NUMBER,
            (Query(NOW.highest("kvtier_breaker_state", "tier"), "{{tier}}"),),
            PanelKind.STATES,
            states=(
                (0, "in use", "green"),
                (1, "being retried", "yellow"),
                (2, "paused", "red"),
                (3, "slab cut short", "red"),
            ),
        ),
        Panel(
            "Copies in flight",
            "Copies that have begun and not ended.",
            Unit.NUMBER,
            (Query(NOW.level("kvtier_transfers_in_flight", "src", "dst"), "{{src}} to {{dst}}"),),
        ),
        Panel(
            "Queue time",
            "Time that queued copies will take at the measured rate; of the longest queue.",
            Unit.SECONDS,
            (Query(NOW.highest("kvtier_queued_seconds", "src", "dst"), "{{src}} to {{dst}}"),),
        ),
        Panel(
            "Storage under SGLang",
            "Tokens read and written.",
            Unit.PER_S,
            (
                Query(NOW.rate("sglang:prefetched_tokens_total"), "SGLang read"),
                Query(NOW.rate("sglang:backuped_tokens_total"), "SGLang written"),
            ),
        ),
    ),
)
