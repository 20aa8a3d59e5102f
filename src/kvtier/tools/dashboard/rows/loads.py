"""Load or recompute: decisions, and how accurate the predictions were."""

from __future__ import annotations

from kvtier.tools.dashboard.panels import Panel, PanelRow, Query, Unit
from kvtier.tools.dashboard.rows.common import LATELY, NOW, QUANTILES, TOO_FEW, quantiles

LOADS = PanelRow(
    "Load or recompute",
    (
        Panel(
            "Decisions",
            "Blocks found in the cache, by decision.",
            Unit.PER_S,
            (
                Query(NOW.rate("kvtier_planned_blocks_total", "decision"), "{{decision}}"),
                Query(
                    NOW.rate("vllm:kvtier_loaded_chunks_total", "tier"), "vLLM load from {{tier}}"
                ),
                Query(NOW.rate("vllm:kvtier_recomputed_chunks_total"), "vLLM recompute"),
            ),
        ),
        Panel(
            "Load time, actual / expected",
            "1 is exact. Above 1, loads are slower than predicted; the planner adapts.",
            Unit.RATIO,
            (
                Query(
                    f"{LATELY.rate('kvtier_actual_load_seconds_total', 'src')} / "
                    f"({LATELY.rate('kvtier_predicted_load_seconds_total', 'src')} > 0)",
                    "{{src}}",
                ),
            ),
            without="no loads in this window",
        ),
        Panel(
            "Prefill time, actual / expected",
            "The same for prefill, the other side of the comparison: 1 is exact.",
            Unit.RATIO,
            (
                Query(
                    f"{LATELY.rate('kvtier_actual_prefill_seconds_total')} / "
                    f"({LATELY.rate('kvtier_predicted_prefill_seconds_total')} > 0)",
                    "prefill",
                ),
            ),
            without="nothing computed in this window",
        ),
        Panel(
            "Single loads, actual / expected",
            f"Actual time of one load divided by its predicted time. {QUANTILES}",
            Unit.RATIO,
            quantiles("kvtier_load_error_ratio", "src", legend="{{src}}"),
            without=TOO_FEW,
        ),
        Panel(
            "Wait for a load",
            f"Time that a request waited for its load. {QUANTILES}",
            Unit.SECONDS,
            quantiles("kvtier_load_seconds", legend=""),
            without=TOO_FEW,
        ),
        Panel(
            "Loads given up",
            "Loads that were late, and requests that waited as long as computing takes. Both were "
            "computed: nothing failed, and a tier was slower than it had been.",
            Unit.PER_S,
            (
                Query(NOW.rate("kvtier_late_loads_total"), "late loads"),
                Query(NOW.rate("vllm:kvtier_impatient_requests_total"), "vLLM impatient requests"),
            ),
        ),
        Panel(
            "Found in storage but not used",
            "Under SGLang: tokens, by reason; beside them all that storage said it has.",
            Unit.PER_S,
            (
                Query(NOW.rate("sglang:storage_prefetch_hit_tokens_total"), "SGLang found"),
                Query(
                    NOW.rate("sglang:storage_prefetch_unfulfilled_tokens_total", "reason"),
                    "SGLang {{reason}}",
                ),
            ),
        ),
    ),
)
