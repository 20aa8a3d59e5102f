"""Explanations agree with the decisions that they explain."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvtier.core.types import DEVICE, DISK, HOST, BlockId, Match
from kvtier.plan import (
    Actual,
    CostModel,
    Costs,
    Decision,
    PrefillCost,
    PromptCost,
    explain,
    ways_of,
    weigh,
)
from kvtier.plan.average import FEW, size_class
from kvtier.plan.explain import COMPUTED, Explanation
from kvtier.plan.operations import MAX_COMPARED
from kvtier.tools.cli.explained import show
from tests.plan.test_plan import BLOCK_BYTES, BLOCK_SIZE, costs_of_any_kind, matches

WAYS = ways_of((DEVICE, HOST), (DISK,), ())
NAMES = {"d": DEVICE, "h": HOST, "s": DISK}


def _match(tiers: str, in_flight: str = "") -> Match:
    flags = tuple(flag == "+" for flag in in_flight.ljust(len(tiers)))
    blocks = tuple(BlockId(number) for number in range(len(tiers)))
    return Match(blocks, tuple(NAMES[tier] for tier in tiers), flags, len(tiers))


def _decide(
    match: Match, costs: Costs, num_tokens: int = 1000, slots: int = 1000, grain: int = 1
) -> Decision:
    return weigh(
        match,
        costs,
        num_tokens=num_tokens,
        block_size=BLOCK_SIZE,
        bytes_per_block=BLOCK_BYTES,
        num_free_slots=slots,
        grain_blocks=grain,
    )


def _measured(num: int, host_s: float = 0.001, disk_s: float = 0.1) -> Costs:
    """Each way and prefill, of a tenth of a second per block, measured ``num`` times."""
    model = CostModel()
    for _ in range(num):
        model.observe_copy((HOST, DEVICE), BLOCK_BYTES, host_s)
        model.observe_copy((DISK, HOST), BLOCK_BYTES, disk_s)
        model.observe_prefill(0, BLOCK_SIZE, 0.1)
    return model.snapshot(ways=WAYS)


@given(matches, costs_of_any_kind, st.integers(1, 60), st.integers(0, 12), st.integers(1, 4))
def test_parts_are_the_plans(
    match: Match, costs: Costs, num_tokens: int, slots: int, grain: int
) -> None:
    decision = _decide(match, costs, num_tokens, slots, grain)
    told, plan = explain(decision), decision.plan
    ends = [0, *(part.end for part in told.parts)]
    assert [part.first for part in told.parts] == ends[:-1]
    assert ends[-1] == num_tokens
    for part in told.parts:
        if part.source != COMPUTED:
            blocks = range(part.first // BLOCK_SIZE, part.end // BLOCK_SIZE)
            assert {match.tiers[at] for at in blocks} == {part.source}
    loaded = [part for part in told.parts if part.source not in (DEVICE, COMPUTED)]
    assert sum(part.predicted_s or 0 for part in loaded) == pytest.approx(plan.load_s)
    assert told.parts[-1].source == COMPUTED, "the last token is always computed"
    computed_s = told.parts[-1].predicted_s
    assert (inf if computed_s is None else computed_s) == plan.recompute_s
    assert all(cut.seconds >= told.chosen.seconds for _, cut in told.rejected)
    left = sum(end - first for first, end, _ in told.left)
    assert left == (match.num_blocks - plan.num_reused_blocks) * BLOCK_SIZE
    json.dumps(told.as_json(), allow_nan=False)
    assert all(len(pair.split("=")) == 2 for pair in str(told).split())


@given(matches, costs_of_any_kind, st.integers(1, 60), st.integers(0, 12), st.integers(1, 4))
def test_cost_of_a_prompt_is_that_of_its_plan(
    match: Match, costs: Costs, num_tokens: int, slots: int, grain: int
) -> None:
    decision = _decide(match, costs, num_tokens, slots, grain)
    cost, plan = PromptCost.of(decision, 0.5, ("s3",)), decision.plan
    num_reused = plan.num_reused_blocks * BLOCK_SIZE
    assert cost.prompt_tokens == num_tokens == num_reused + cost.computed_tokens
    assert dict(cost.reused_tokens) == _by_tier(match.tiers[: plan.num_reused_blocks])
    assert dict(cost.declined_tokens) == _by_tier(match.tiers[plan.num_reused_blocks :])
    if plan.recompute_s == inf:
        assert cost.seconds is cost.compute_s is None
    else:
        assert cost.seconds == pytest.approx(0.5 + plan.load_s + plan.recompute_s)
        assert PromptCost.of(decision).seconds == pytest.approx(plan.load_s + plan.recompute_s)
    assert cost.unknown_in == ("s3",)
    assert cost.unmeasured == [what for what, num in explain(decision).weak if not num]
    json.dumps(asdict(cost), allow_nan=False)


def _by_tier(tiers: tuple[str, ...]) -> dict[str, int]:
    return {tier: tiers.count(tier) * BLOCK_SIZE for tier in tiers}


def test_alternatives_are_those_that_were_compared() -> None:
    told = explain(_decide(_match("ddhhss"), _measured(9, disk_s=10.0), num_tokens=30))
    assert told.num_reused == 4 * BLOCK_SIZE
    assert [tokens for tokens, _ in told.rejected] == [0, 2 * BLOCK_SIZE, 6 * BLOCK_SIZE]
    nothing, device_only, everything = (cut for _, cut in told.rejected)
    assert nothing.seconds == pytest.approx(0.1 / BLOCK_SIZE * 30)
    assert device_only.load_s == 0
    assert everything.load_s > 20
    assert told.left == ((16, 24, DISK),)
    assert told.weak == ()


def test_few_measurements_are_told_of() -> None:
    match = _match("hhss")
    few = explain(_decide(match, _measured(FEW - 1, disk_s=0.01)))
    assert dict(few.weak) == {
        "host -> device": FEW - 1,
        "disk -> host": FEW - 1,
        "computing": FEW - 1,
    }
    assert [part.num_measured for part in few.parts] == [FEW - 1] * 3
    assert explain(_decide(match, _measured(FEW, disk_s=0.01))).weak == ()
    assert "too_few_measurements=host->device:4,disk->host:4,computing:4" in str(few)


def test_measurements_are_those_of_the_size_that_the_estimate_is_from() -> None:
    model = CostModel()
    for _ in range(7):
        model.observe_copy((HOST, DEVICE), 1, 1.0)
    model.observe_copy((HOST, DEVICE), 1 << 20, 1.0)
    costs = model.snapshot(ways=WAYS)
    assert size_class(1 << 20) != size_class(1)
    assert costs.num_measured((HOST, DEVICE), 1 << 21) == 1
    assert costs.num_measured((HOST, DEVICE), 2) == 7
    assert costs.num_measured((DISK, HOST), 2) == 0


def test_what_came_of_it_stands_beside_what_was_expected() -> None:
    decision = _decide(_match("dhhs"), _measured(9, disk_s=0.01), num_tokens=20)
    arrivals = [(range(1, 2), 0.5), (range(2, 3), 0.25), (range(3, 4), 2.0)]
    told = explain(decision, Actual(arrivals, load_s=2.0, compute_s=0.3))
    assert [(part.source, part.actual_s) for part in told.parts] == [
        (DEVICE, 0.0),
        (HOST, 0.5),
        (DISK, 2.0),
        (COMPUTED, 0.3),
    ]


def _notes(told: Explanation) -> str:
    return " ".join(told.notes)


def test_why_more_was_not_reused() -> None:
    cheap = _measured(9, disk_s=1e-6)
    assert "no room" in _notes(explain(_decide(_match("hhhh"), cheap, slots=2)))
    assert "grid" in _notes(explain(_decide(_match("hhhh"), cheap, num_tokens=16, grain=2)))
    assert "nothing of this prompt" in _notes(explain(_decide(_match(""), cheap)))
    assert "another request" in _notes(explain(_decide(_match("hh", "+ "), cheap)))
    assert _notes(explain(_decide(_match("hhhh"), cheap, num_tokens=17))) == ""


def test_what_was_not_weighed_has_no_estimates() -> None:
    decision = _decide(_match("hh"), Costs(ways=WAYS), num_tokens=20)
    always = Decision(
        decision.match, decision.costs, decision.plan, 20, BLOCK_SIZE, BLOCK_BYTES, is_weighed=False
    )
    told = explain(always)
    assert [part.predicted_s for part in told.parts] == [None, None]
    assert told.weak == ()
    assert "policy is always" in _notes(told)


def test_plan_remembers_few_of_many_cuts_and_the_longest() -> None:
    costs = Costs(prefill=PrefillCost(1.0), ways=WAYS)
    plan = _decide(_match("dh" * 200), costs, num_tokens=10_000).plan
    assert len(plan.compared) <= MAX_COMPARED
    assert plan.compared[-1].num_blocks == 400
    assert list(plan.compared) == sorted(plan.compared, key=lambda cut: cut.num_blocks)


# -- in words --------------------------------------------------------------------------------------


def _shown(told: Explanation) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    show(told.as_json(), "model at server", console)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_words_say_what_was_expected_what_it_took_and_what_else_there_was() -> None:
    decision = _decide(_match("ddhhss"), _measured(9, disk_s=10.0), num_tokens=30)
    text = _shown(explain(decision, Actual([(range(2, 4), 0.004)], load_s=0.004, compute_s=0.5)))
    assert "model at server: 30 tokens, 16 of them reused" in text
    assert "8-15 host memory 2 ms 4 ms about 200 ms" in text
    assert "16-29 computed 350 ms 500 ms" in text
    assert "Loading 8 tokens took 4 ms; computing them would have taken about 200 ms." in text
    assert "Compared with reusing nothing: about 750 ms, against about 352 ms" in text
    assert "Not used: tokens 16-23, found in disk." in text
    assert "Too few" not in text


def test_what_was_never_measured_is_no_figure() -> None:
    model = CostModel()
    for _ in range(FEW):
        model.observe_prefill(0, BLOCK_SIZE, 0.1)
    text = _shown(explain(_decide(_match("hh"), model.snapshot(ways=WAYS), num_tokens=20)))
    assert "0-7 host memory unknown" in text
    assert "What was done was never measured: a try." in text
    assert "Too few measurements to rely on the estimates for: host -> device (0)." in text
    nothing = _shown(explain(_decide(_match("hh"), Costs(ways=WAYS), num_tokens=20)))
    assert "its cost is not known yet" in nothing


def test_a_store_s_name_can_not_command_the_terminal() -> None:
    found = explain(_decide(_match("hh"), _measured(9), num_tokens=20)).as_json()
    found["parts"][0]["from"] = "a\x1b[2J"  # type: ignore[index]
    console = Console(file=io.StringIO(), width=200)
    show(found, "x", console)
    assert isinstance(console.file, io.StringIO)
    assert "\x1b" not in console.file.getvalue()
