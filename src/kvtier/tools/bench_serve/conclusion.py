"""The last words of a run: what was found, for somebody who sees it for the first time.

Each paragraph says what was asked, what came out and how sure that is. What a run of this size
can't tell has no figure, but says what would tell.
"""

from __future__ import annotations

from kvtier.tools.bench_serve.accuracy import AccuracyResult
from kvtier.tools.bench_serve.options import ServeOptions
from kvtier.tools.bench_serve.overhead import FULL_PAIRS, OverheadResult
from kvtier.tools.bench_serve.result import ServeResult
from kvtier.tools.bench_serve.summary import store_sentence
from kvtier.tools.bench_serve.ttft import TtftResult
from kvtier.tools.report.figures import (
    SURE,
    TOO_FEW,
    about,
    change,
    counted,
    milliseconds,
    percent,
)
from kvtier.tools.report.stats import Estimate, Summary
from kvtier.tools.report.target import TOO_SMALL
from kvtier.types import DISK

FULL_COMMAND = "kvtier bench serve"
WRONG = "This must not be: please keep the JSON of this run (--json FILE), and report it."


def conclusion(result: ServeResult) -> list[str]:
    """A paragraph for each question that was asked; then, after a small run, what asks more."""
    found = []
    if result.ttft is not None:
        found += _ttft(result.ttft)
    if result.accuracy is not None:
        found.append(_accuracy(result.accuracy))
    if result.overhead is not None:
        found.append(_overhead(result.overhead))
    if result.slow_disk is not None:
        p50 = result.slow_disk.p50_loss
        found.append(
            "A disk slower than computing: the median time to first token "
            + (f"changed by {change(p50)}." if p50.is_bounded else f"is {TOO_FEW}.")
        )
    if result.store is not None:
        found.append(store_sentence(result.store))
    if result.overlap is not None and not result.overlap.all_same:
        found.append(f"Logits of a prompt that was computed while it was loaded differ. {WRONG}")
    if result.options.quick:
        found.append(_what_tells_more(result.options))
    return found


def _ttft(result: TtftResult) -> list[str]:
    first, again = result.whole_pass(1), result.whole_pass(2)
    asked = f"{counted(result.num_prompts, 'prompt')} of {result.prompt_tokens:,} tokens"
    found = [_sooner("Asked again", asked, first, again, result.reduction)]
    from_disk = result.reduction_from(DISK)
    if from_disk is not None and from_disk.is_bounded and from_disk.low > 0:
        found.append(
            f"After a restart, from disk: {about(from_disk)} sooner ({_interval(from_disk)})."
        )
    if result.num_same < result.num_warm:
        wrong = counted(result.num_warm - result.num_same, "request")
        found.append(f"{wrong} of the later passes got other logits than the first pass. {WRONG}")
    return found


def _sooner(when: str, asked: str, first: Summary, again: Summary, saved: Estimate) -> str:
    times = f"{milliseconds(again.mean)} instead of {milliseconds(first.mean)}"
    if not saved.is_bounded:
        return f"{when}: {asked} are too few to tell how much sooner an answer begins."
    if saved.contains(0):
        return f"{when}: {asked} can't tell whether an answer begins sooner ({times})."
    word, size = "sooner", saved
    if saved.value < 0:
        word, size = "later", saved.changed(lambda each: -each)
    return (
        f"{when}, a prompt's answer began {about(size)} {word}: after {times}, the mean of {asked} "
        f"({_interval(size)})."
    )


def _interval(found: Estimate) -> str:
    digits = 1 if found.high - found.low < 0.1 else 0
    low, high = (percent(each, digits=digits) for each in (found.low, found.high))
    return f"{SURE}: {low} to {high}"


def _accuracy(result: AccuracyResult) -> str:
    asked, equal = result.num_prompts, result.num_equal()
    if equal < asked:
        return (
            f"The answers differ: only {equal} of {asked} prompts had, from each tier, the logits "
            f"of a run without the cache. {WRONG}"
        )
    same = (
        f"The answers are the same: from device, host and disk, all logits of "
        f"{counted(asked, 'prompt')} were those of a run without the cache, bit for bit."
    )
    if result.num_noticed() < asked:
        return f"{same} But some blocks were damaged on purpose, and not noticed. {WRONG}"
    return f"{same} Blocks that were damaged on purpose were noticed each time."


def _overhead(result: OverheadResult) -> str:
    what = "What the cache costs where nothing can be reused"
    if not result.full_size:
        pairs = counted(len(result.rows), "pair")
        return f"{what}: {TOO_SMALL}, {pairs} of runs where {FULL_PAIRS} are needed."
    ttft, throughput = (
        change(ratio.changed(lambda each: each - 1))
        for ratio in (result.ttft_ratio, result.throughput_ratio)
    )
    return f"{what}: time to first token {ttft}, throughput {throughput}."


def _what_tells_more(options: ServeOptions) -> str:
    model = "" if options.model == ServeOptions().model else f" --model {options.model}"
    return (
        f"This was a look. {FULL_COMMAND}{model} measures at full size, on two cores in about ten "
        "minutes with the built-in model. To serve: kvtier serve."
    )
