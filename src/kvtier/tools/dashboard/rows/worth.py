"""Value of the cache: hit shares, and the prefill time that they saved."""

from __future__ import annotations

from kvtier.tools.dashboard.panels import Panel, PanelKind, PanelRow, Query, Unit
from kvtier.tools.dashboard.queries import share
from kvtier.tools.dashboard.rows.common import LATELY, NOW, SHOWN


def _hit_share(*by: str) -> str:
    whole = LATELY.rate("kvtier_prompt_blocks_total")
    return share(LATELY.rate("kvtier_hit_blocks_total", *by), whole)


WORTH = PanelRow(
    "Is it worth it?",
    (
        Panel(
            "Prompt tokens from cache",
            "Share of prompt tokens served from the cache, over the chosen window. If it is low "
            "although prompts share prefixes, look at evictions and at cache_salt.",
            Unit.SHARE,
            (
                Query(_hit_share(), "kvtier serve"),
                Query(
                    share(
                        LATELY.rate("vllm:prompt_tokens_cached_total"),
                        LATELY.rate("vllm:prompt_tokens_total"),
                    ),
                    "vLLM",
                ),
                Query(
                    share(
                        LATELY.rate("sglang:cached_tokens_total"),
                        LATELY.rate("sglang:prompt_tokens_total"),
                    ),
                    "SGLang",
                ),
            ),
            PanelKind.NUMBER,
            without="no prompts in this window",
        ),
        Panel(
            "Tokens not computed",
            "Prompt tokens served from the cache, in the time shown.",
            Unit.NUMBER,
            (
                Query(SHOWN.increase("kvtier_saved_tokens_total"), "kvtier"),
                Query(SHOWN.increase("kvtier_server_cached_tokens_total"), "kvtier serve"),
                Query(SHOWN.increase("vllm:prompt_tokens_cached_total"), "vLLM"),
                Query(SHOWN.increase("sglang:cached_tokens_total"), "SGLang"),
            ),
            PanelKind.NUMBER,
        ),
        Panel(
            "Prefill time saved",
            "Time that computing these tokens would have taken at the measured rate, in the time "
            "shown.",
            Unit.SECONDS,
            (Query(SHOWN.increase("kvtier_saved_seconds_total"), "kvtier"),),
            PanelKind.NUMBER,
        ),
        Panel(
            "Prompt tokens by source",
            "Share of prompt tokens by the tier that held them. Tokens in the device pool cost "
            "nothing; others were loaded because loading was faster than computing.",
            Unit.SHARE,
            (
                Query(_hit_share("tier"), "{{tier}}"),
                Query(
                    share(
                        LATELY.rate("vllm:prompt_tokens_cached_by_source_total", "source"),
                        LATELY.rate("vllm:prompt_tokens_total"),
                    ),
                    "vLLM {{source}}",
                ),
                Query(
                    share(
                        LATELY.rate("sglang:cached_tokens_total", "cache_source"),
                        LATELY.rate("sglang:prompt_tokens_total"),
                    ),
                    "SGLang {{cache_source}}",
                ),
            ),
            width=12,
            is_stacked=True,
            highest=1,
            without="no prompts in this window",
        ),
        Panel(
            "Prompt tokens",
            "All prompt tokens, and those served from the cache.",
            Unit.PER_S,
            (
                Query(NOW.rate("kvtier_server_prompt_tokens_total"), "all"),
                Query(NOW.rate("kvtier_server_cached_tokens_total"), "not computed"),
                Query(NOW.rate("vllm:prompt_tokens_total"), "vLLM all"),
                Query(NOW.rate("vllm:prompt_tokens_cached_total"), "vLLM not computed"),
                Query(NOW.rate("sglang:prompt_tokens_total"), "SGLang all"),
                Query(NOW.rate("sglang:cached_tokens_total"), "SGLang not computed"),
            ),
            width=12,
        ),
    ),
)
