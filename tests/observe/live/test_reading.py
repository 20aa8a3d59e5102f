"""Parsing one scrape of any supported engine."""

from __future__ import annotations

import pytest

from kvtier.observe import specs
from kvtier.observe.live.dialects import dialect_of
from kvtier.observe.live.reading import MAX_LINE, MAX_LINES, Reading, UnreadableError

from .texts import reading, recorded

ONLY_ONCE_IT_HAPPENED = {
    specs.RETURNED_BLOCKS,
    specs.RETURN_SECONDS,
    specs.UNADMITTED_BLOCKS,
}
NOT_RECORDED = {specs.AUDITS, specs.SLOT_BYTES, specs.PROBED_BLOCKS, specs.HINTS}
"""Metrics added after the texts were recorded."""
ENGINES = {"kvtier": "kvtier", "vllm": "vLLM", "sglang": "SGLang"}


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_is_known_by_its_metrics(engine: str) -> None:
    dialect = dialect_of(recorded(engine, 1, 0.0))
    assert dialect is not None
    assert dialect.engine == ENGINES[engine]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_tells_the_shared_metrics_by_the_same_names(engine: str) -> None:
    told = recorded(engine, 2, 0.0)
    for spec in specs.SAME_UNDER_ENGINES:
        if spec not in ONLY_ONCE_IT_HAPPENED | NOT_RECORDED:
            assert told.has(spec.name + ("_count" if spec.kind == "histogram" else "")), spec


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_dialect_names_is_told(engine: str) -> None:
    told = recorded(engine, 2, 0.0)
    dialect = dialect_of(told)
    assert dialect is not None
    named = [dialect.asked, dialect.given, dialect.prompt_tokens, dialect.running, dialect.waiting]
    named += [f"{dialect.ttft}_count", dialect.requests, *filter(None, [dialect.device])]
    assert [name for name in named if not told.has(name)] == []


def test_ranks_and_models_are_summed_and_the_worst_of_what_has_no_sum() -> None:
    told = reading(
        0.0,
        {
            'vllm:kvtier_planned_blocks_total{engine="0",decision="load"}': 3,
            'vllm:kvtier_planned_blocks_total{engine="1",decision="load"}': 4,
            'vllm:kvtier_breaker_state{engine="0",tier="disk"}': 2,
            'vllm:kvtier_breaker_state{engine="1",tier="disk"}': 0,
        },
    )
    assert told.total("kvtier_planned_blocks_total", decision="load") == 7
    assert told.total("kvtier_breaker_state", tier="disk") == 2


def test_vllms_older_names_are_the_same_numbers() -> None:
    told = reading(0.0, {'vllm:kvtier_moved_bytes_total{src="disk",dst="host"}': 5})
    assert told.by_route("kvtier_copied_bytes_total") == {("disk", "host"): 5}


def test_what_is_not_told_is_none_and_not_nothing() -> None:
    told = reading(0.0, {'a_total{tier="x"}': 1})
    assert told.total("b_total") is None
    assert told.total("a_total", tier="y") == 0


@pytest.mark.parametrize("text", ["<html>no</html>", "a{b 1\n", 'a{b="c"} many\n'])
def test_what_is_no_metrics_text_is_said_so(text: str) -> None:
    with pytest.raises(UnreadableError, match="no Prometheus metrics"):
        Reading.parse(text, 0.0)


def test_a_counter_that_fell_or_went_is_a_server_that_began_anew() -> None:
    before = reading(0.0, {"a_total": 5, "b": 7})
    assert not reading(1.0, {"a_total": 5, "b": 1}).has_fallen(before)
    assert reading(1.0, {"a_total": 4, "b": 9}).has_fallen(before)
    assert reading(1.0, {"b": 9}).has_fallen(before)


def test_a_label_is_text_that_a_terminal_can_show() -> None:
    told = Reading.parse('kvtier_slots{tier="[/x]\x1b]0;title\x07' + "x" * 5000 + '"} 1\n', 0.0)
    (name,) = told.by("kvtier_slots", "tier")
    assert name.startswith("[/x]\\x1b]0;title\\x07xxx")
    assert len(name) < 100


@pytest.mark.parametrize("value", ["NaN", "-1", "-Inf", "+Inf", "1e300"])
def test_values_that_no_metric_has_are_left_out(value: str) -> None:
    told = Reading.parse(f"kvtier_saved_seconds_total {value}\nkvtier_slots 1\n", 0.0)
    assert not told.has("kvtier_saved_seconds_total")
    assert told.has("kvtier_slots")


@pytest.mark.parametrize(
    "text",
    [
        "".join(f'kvtier_slots{{tier="{at}"}} 1\n' for at in range(100)),
        "".join(f'kvtier_queued_seconds{{src="{at}",dst="a"}} 1\n' for at in range(3000)),
        "".join(f'b_bucket{{le="{at}"}} 1\n' for at in range(3000)),
        "a 1\n" * MAX_LINES,
        "# " + "a" * MAX_LINE,
    ],
    ids=["tiers", "routes", "buckets", "lines", "line"],
)
def test_more_than_an_engine_has_is_refused(text: str) -> None:
    with pytest.raises(UnreadableError, match="more series|more than 50,000 lines"):
        Reading.parse(text, 0.0)
