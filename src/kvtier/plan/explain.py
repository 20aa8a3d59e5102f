"""Explains a decision of the planner in words and figures.

Shows the source of each part of a prompt, the alternatives, and their estimated costs. It decides
and estimates nothing: everything is read from the inputs of the plan, which a lease keeps anyway.
So it costs nothing until it is requested.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

from kvtier.core.grouping import runs_of
from kvtier.core.types import DEVICE, Match
from kvtier.plan.average import FEW
from kvtier.plan.cost import Costs, Route
from kvtier.plan.operations import Cut, Plan

COMPUTED = "computed"
"""Source of the part that was in no tier, or was faster to compute."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Inputs of a plan at the time it was made.

    num_tokens: length of the prompt.
    block_size: tokens; may be a multiple of the cache's own.
    grain_blocks: cuts are multiples of this.
    is_weighed: False if everything found is loaded regardless of cost.
    """

    match: Match
    costs: Costs
    plan: Plan
    num_tokens: int
    block_size: int
    bytes_per_block: int
    grain_blocks: int = 1
    is_weighed: bool = True


@dataclass(frozen=True, slots=True)
class Actual:
    """Outcome of a plan as far as it is known; times in seconds.

    arrivals: positions of blocks, and when they arrived after the plan.
    load_s: time until all had arrived.
    compute_s: total for the prompt.
    waited_s: time before the plan.
    first_token_s: time since the request's arrival.
    num_failed_loads: failed loads before this plan.
    overlaps: whether the prompt was computed while it was still being loaded.
    claimed: positions of blocks that were computed meanwhile, although they were found.
    audit: the outcome of an audit of its cached part, in words; "" for none.
    """

    arrivals: Sequence[tuple[range, float]] = ()
    load_s: float | None = None
    compute_s: float | None = None
    waited_s: float | None = None
    first_token_s: float | None = None
    num_failed_loads: int = 0
    overlaps: bool = False
    claimed: Sequence[range] = ()
    audit: str = ""


UNKNOWN = Actual()


@dataclass(frozen=True, slots=True)
class ExplainedPart:
    """Tokens ``first`` up to ``end``.

    source: the tier where they were found, or ``COMPUTED``.
    predicted_s, actual_s: time to load or compute them; None if unknown.
    compute_s: estimated time to compute them.
    num_measured: measurements behind ``predicted_s``, the fewest of its steps.
    is_coming: whether they were in flight already.
    """

    first: int
    end: int
    source: str
    predicted_s: float | None
    actual_s: float | None
    compute_s: float | None
    num_measured: int | None
    is_coming: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of one decision.

    rejected: the alternatives closest to the chosen cut, with the tokens that they reuse.
    weak: estimates from fewer than ``FEW`` measurements, with the number of these.
    left: parts found but not used: first token, end, tier.
    notes: sentences.
    """

    num_tokens: int
    num_reused: int
    parts: tuple[ExplainedPart, ...]
    chosen: Cut
    rejected: tuple[tuple[int, Cut], ...]
    weak: tuple[tuple[str, int], ...]
    left: tuple[tuple[int, int, str], ...]
    actual: Actual
    notes: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, object]:
        """Return plain data; null if unknown."""
        actual = self.actual
        return {
            "prompt_tokens": self.num_tokens,
            "reused_tokens": self.num_reused,
            "parts": [
                {
                    "first": part.first,
                    "end": part.end,
                    "from": part.source,
                    "predicted_s": part.predicted_s,
                    "took_s": part.actual_s,
                    "compute_s": part.compute_s,
                    "measured": part.num_measured,
                }
                for part in self.parts
            ],
            "predicted": {
                "load_s": _known(self.chosen.load_s),
                "compute_s": _known(self.chosen.recompute_s),
            },
            "took": {
                "wait_s": actual.waited_s,
                "load_s": actual.load_s,
                "compute_s": actual.compute_s,
                "first_token_s": actual.first_token_s,
            },
            "rejected": [
                {
                    "reused_tokens": tokens,
                    "load_s": _known(cut.load_s),
                    "compute_s": _known(cut.recompute_s),
                }
                for tokens, cut in self.rejected
            ],
            "not_used": [
                {"first": first, "end": end, "in": tier} for first, end, tier in self.left
            ],
            "too_few_measurements": [{"of": what, "number": num} for what, num in self.weak],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """Return ``key=value`` pairs for a log."""
        by_source: dict[str, int] = {}
        for part in self.parts:
            by_source[part.source] = by_source.get(part.source, 0) + part.end - part.first
        pairs: list[tuple[str, object]] = [("tokens", self.num_tokens), ("reused", self.num_reused)]
        pairs += [(f"{source}_tokens", num) for source, num in by_source.items()]
        seconds = [
            ("predicted_load_s", _known(self.chosen.load_s)),
            ("load_s", self.actual.load_s),
            ("predicted_compute_s", _known(self.chosen.recompute_s)),
            ("compute_s", self.actual.compute_s),
        ]
        seconds += [(f"reusing_{tokens}_s", _known(cut.seconds)) for tokens, cut in self.rejected]
        pairs += [(name, f"{value:.4f}") for name, value in seconds if value is not None]
        if self.weak:
            few = ",".join(f"{what.replace(' ', '')}:{num}" for what, num in self.weak)
            pairs.append(("too_few_measurements", few))
        return " ".join(f"{name}={value}" for name, value in pairs)


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Estimated cost of a prompt in one engine: the answer of servers and nodes to routers.

    ``reused_tokens`` and ``computed_tokens`` add up to ``prompt_tokens``.

    Attributes:
        prompt_tokens: length of the prompt.
        reused_tokens: tokens that would be reused, by tier; each counts in the fastest one.
        computed_tokens: tokens that would be computed.
        declined_tokens: tokens by tier that were found but would be computed: that is faster,
            there is no room for them, or they end within a chunk.
        load_s: seconds to load the reused tokens, including the copies that are queued before. A
            copy of a kind that was never measured counts as nothing: see ``unmeasured``.
        compute_s: seconds to compute the others, while the engine does nothing else; null if no
            prefill was measured yet.
        queue_s: seconds to compute the rest of the prompts that come before this one; null if the
            answering process does not know them.
        seconds: the sum of those that are known; null if ``compute_s`` is. It is an estimate of
            the time to the first token. It does not cover tokens that the engine generates
            meanwhile for others, nor a wait until their end makes room.
        unknown_in: storage tiers that may have more of the prompt: they can't answer without a
            wait, or were not asked.
        unmeasured: kinds of copies, such as "disk -> host", between the tiers that have some of the
            prompt and the device, of which none was measured yet.
    """

    prompt_tokens: int
    reused_tokens: Mapping[str, int]
    computed_tokens: int
    declined_tokens: Mapping[str, int]
    load_s: float
    compute_s: float | None
    queue_s: float | None = None
    seconds: float | None = None
    unknown_in: Sequence[str] = ()
    unmeasured: Sequence[str] = ()

    @classmethod
    def of(
        cls, decision: Decision, queue_s: float | None = None, unknown_in: Sequence[str] = ()
    ) -> PromptCost:
        """Return the cost of a prompt by a decision that was made for it."""
        found = explain(decision)
        tokens = dict[str, int]()
        declined = dict[str, int]()
        for part in found.parts:
            tokens[part.source] = tokens.get(part.source, 0) + part.end - part.first
        for first, end, tier in found.left:
            declined[tier] = declined.get(tier, 0) + end - first
        num_computed = tokens.pop(COMPUTED, 0)
        load_s, compute_s = found.chosen.load_s, _known(found.chosen.recompute_s)
        seconds = None if compute_s is None else load_s + compute_s + (queue_s or 0.0)
        return cls(
            found.num_tokens,
            tokens,
            num_computed,
            declined,
            load_s,
            compute_s,
            queue_s,
            seconds,
            unknown_in,
            [what for what, num in found.weak if not num],
        )


def explain(decision: Decision, actual: Actual = UNKNOWN) -> Explanation:
    """Explain a decision. Cost: O(blocks of the match)."""
    plan, size = decision.plan, decision.block_size
    end = min(plan.num_reused_blocks * size, decision.num_tokens)
    return Explanation(
        decision.num_tokens,
        end - sum(map(len, actual.claimed)) * size,
        (*_reused(decision, actual), *_computed(decision, actual, end)),
        Cut(plan.num_reused_blocks, plan.load_s, plan.recompute_s),
        tuple((cut.num_blocks * size, cut) for cut in _rejected(plan)),
        tuple(_weak(decision)),
        tuple(_left(decision)),
        actual,
        tuple(_notes(decision, actual)),
    )


def _reused(decision: Decision, actual: Actual) -> Iterator[ExplainedPart]:
    """Yield the runs of blocks found in one tier, or computed nevertheless, up to the cut."""
    costs, size = decision.costs, decision.block_size
    tiers = list(decision.match.tiers)
    for chunk in actual.claimed:
        tiers[chunk.start : chunk.stop] = [COMPUTED] * len(chunk)
    match = replace(decision.match, tiers=tuple(tiers)) if actual.claimed else decision.match
    runs = list(_runs(match, 0, decision.plan.num_reused_blocks))
    tier_s = _seconds_by_tier(decision, runs)
    of_tier: dict[str, int] = {}
    for tier, _, run in runs:
        of_tier[tier] = of_tier.get(tier, 0) + len(run)
    arrivals = sorted(actual.arrivals, key=lambda arrival: arrival[0].start)
    starts = [where.start for where, _ in arrivals]
    for tier, is_coming, run in runs:
        first, end = run.start * size, run.stop * size
        compute_s = _known(costs.prefill_s(first, end))
        if tier == DEVICE:
            yield ExplainedPart(first, end, tier, 0.0, 0.0, compute_s, None)
            continue
        if tier == COMPUTED:
            yield ExplainedPart(first, end, tier, compute_s, None, compute_s, costs.num_prefills)
            continue
        some = slice(max(0, bisect_right(starts, run.start) - 1), bisect_left(starts, run.stop))
        times = [seconds for where, seconds in arrivals[some] if run.start < where.stop]
        yield ExplainedPart(
            first,
            end,
            tier,
            tier_s[tier] * len(run) / of_tier[tier] if decision.is_weighed else None,
            max(times, default=None),
            compute_s,
            _num_measured(decision, tier, of_tier[tier]) if decision.is_weighed else None,
            is_coming,
        )


def _computed(decision: Decision, actual: Actual, first: int) -> Iterator[ExplainedPart]:
    if first < decision.num_tokens:
        predicted_s = _known(decision.plan.recompute_s)
        num = decision.costs.num_prefills if decision.is_weighed else None
        end = decision.num_tokens
        yield ExplainedPart(first, end, COMPUTED, predicted_s, actual.compute_s, predicted_s, num)


def _runs(match: Match, first: int, end: int) -> Iterator[tuple[str, bool, range]]:
    """Yield runs of similar blocks: their tier, whether they are in flight, their positions."""
    for tier, run in runs_of(match.tiers[first:end], first):
        for is_coming, part in runs_of(match.in_flight[run.start : run.stop], run.start):
            yield tier, is_coming, part


def _seconds_by_tier(
    decision: Decision, runs: Sequence[tuple[str, bool, range]]
) -> dict[str, float]:
    """Distribute the plan's load time over the tiers, each step by the bytes copied.

    So the parts add up to the plan's load time.
    """
    costs = decision.costs
    num_bytes: dict[str, int] = {}
    for tier, is_coming, run in runs:
        if tier not in (DEVICE, COMPUTED):
            moved = 0 if is_coming else len(run) * decision.bytes_per_block
            num_bytes[tier] = num_bytes.get(tier, 0) + moved
    users: dict[Route, list[str]] = {}
    for tier in num_bytes:
        for route in costs.ways[tier]:
            users.setdefault(route, []).append(tier)
    seconds = dict.fromkeys(num_bytes, 0.0)
    for route, tiers in users.items():
        total = sum(num_bytes[tier] for tier in tiers)
        route_s = costs.copy_s(route, total) + costs.queued_s.get(route, 0.0)
        for tier in tiers:
            seconds[tier] += route_s * (num_bytes[tier] / total if total else 1 / len(tiers))
    return seconds


def _num_measured(decision: Decision, tier: str, num_blocks: int) -> int:
    """Return the number of measurements of the least measured step from ``tier``."""
    size = num_blocks * decision.bytes_per_block
    costs = decision.costs
    return min((costs.num_measured(route, size) for route in costs.ways[tier]), default=0)


def _rejected(plan: Plan) -> Iterator[Cut]:
    """Yield the alternatives: compute everything, reuse what needs no load, reuse everything."""
    chosen = plan.num_reused_blocks
    told = {chosen}
    free = [cut for cut in plan.compared if not cut.load_s]
    nothing = Cut(0, 0.0, plan.all_recompute_s)
    for cut in (nothing, *free[-1:], *plan.compared[-1:]):
        if cut.num_blocks not in told:
            told.add(cut.num_blocks)
            yield cut


def _weak(decision: Decision) -> Iterator[tuple[str, int]]:
    """Yield the steps that were estimated from too few measurements."""
    if not decision.is_weighed:
        return
    costs, num_blocks = decision.costs, dict[str, int]()
    for tier, _, run in _runs(decision.match, 0, decision.match.num_blocks):
        num_blocks[tier] = num_blocks.get(tier, 0) + len(run)
    told: set[Route] = set()
    for tier, num in num_blocks.items():
        for route in costs.ways.get(tier, ()) if tier != DEVICE else ():
            seen = costs.num_measured(route, num * decision.bytes_per_block)
            if seen < FEW and route not in told:
                told.add(route)
                yield " -> ".join(route), seen
    if costs.num_prefills < FEW:
        yield "computing", costs.num_prefills


def _left(decision: Decision) -> Iterator[tuple[int, int, str]]:
    size, match = decision.block_size, decision.match
    for tier, run in runs_of(
        match.tiers[decision.plan.num_reused_blocks :], decision.plan.num_reused_blocks
    ):
        yield run.start * size, run.stop * size, tier


def _notes(decision: Decision, actual: Actual) -> Iterator[str]:
    plan, match = decision.plan, decision.match
    if not decision.is_weighed:
        yield "everything that is found is loaded: the load policy is always"
    if not match.num_blocks:
        yield "nothing of this prompt was found in any tier"
    grid = max(1, decision.grain_blocks)
    last = (decision.num_tokens - 1) // decision.block_size // grid * grid
    usable = min(match.num_blocks // grid * grid, last)
    if plan.num_reused_blocks < match.num_blocks and plan.num_reused_blocks >= usable:
        yield (
            "what was found beyond the reused part is computed: prompts are cut on a grid of "
            f"{grid * decision.block_size} tokens, and the last token is always computed"
        )
    elif plan.num_reused_blocks < usable and not any(
        cut.num_blocks > plan.num_reused_blocks for cut in plan.compared
    ):
        yield "more was found, but there was no room for it, or its load would have come too late"
    if any(is_coming for _, is_coming, _ in _runs(match, 0, plan.num_reused_blocks)):
        yield "some of it was on its way to the device already, for another request"
    if actual.num_failed_loads:
        yield (
            f"loads before this plan that failed or came too late: {actual.num_failed_loads}; "
            "their seconds are in the time until the first token only"
        )
    if actual.audit:
        yield actual.audit
    if actual.overlaps:
        yield "the first tokens were computed while others were being loaded: the seconds overlap"


def _known(seconds: float) -> float | None:
    return seconds if isfinite(seconds) else None
