"""Sentences and table cells of a run, for the terminal and the report.

``verdicts`` are the rows of the table and the cards of the report. ``conclusion`` explains them to
a first-time reader: question, result and confidence. A question that a run of this size cannot
answer has no figure, but names the run that would answer it.
"""

from __future__ import annotations

from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.tools.bench_serve.accuracy import TIERS, AccuracyResult
from kvtier.tools.bench_serve.options import ServeOptions
from kvtier.tools.bench_serve.overhead import FULL_PAIRS, OverheadResult
from kvtier.tools.bench_serve.overlap import Case, OverlapResult
from kvtier.tools.bench_serve.result import ServeResult
from kvtier.tools.bench_serve.slow_disk import SlowDiskResult
from kvtier.tools.bench_serve.store import StoreResult
from kvtier.tools.bench_serve.ttft import COLD, WARM, TtftResult
from kvtier.tools.report.figures import (
    SURE,
    TOO_FEW,
    Verdict,
    about,
    change,
    counted,
    milliseconds,
    percent,
)
from kvtier.tools.report.stats import Estimate, Summary
from kvtier.tools.report.target import TOO_SMALL

PLACES = {
    COLD: "Without the cache",
    DISK: "From disk, after a restart",
    HOST: "From host memory",
    DEVICE: "From device memory",
}
"""Labels by source of a prompt's beginning, slowest first."""
FROM_STORE = "From the store"
FULL_COMMAND = "kvtier bench serve"
WRONG = "This is a bug: please keep the JSON of this run (--json FILE) and report it."


def verdicts(result: ServeResult) -> list[Verdict]:
    """Return the findings of a run, the most important first."""
    found: list[Verdict] = []
    if result.ttft is not None:
        found += _ttft(result.ttft)
    if result.accuracy is not None:
        found += _accuracy(result.accuracy)
    if result.overhead is not None:
        found.append(_overhead(result.overhead))
    if result.slow_disk is not None:
        found.append(_slow_disk(result.slow_disk))
    if result.overlap is not None:
        found.append(_overlap(result.overlap))
    if result.store is not None:
        found += _store(result.store)
    return found


def headline(result: ServeResult) -> str:
    """Return the result of the run in one short sentence."""
    if result.ttft is not None:
        saved = result.ttft.reduction
        if not saved.is_bounded or saved.contains(0):
            prompts = counted(result.ttft.num_prompts, "prompt")
            return f"After {prompts} it can't be told whether the first token came sooner."
        if saved.value > 0:
            return f"The first token came {about(saved)} sooner."
        return f"The first token came {about(saved.changed(lambda each: -each))} later."
    if result.accuracy is not None:
        equal, asked = result.accuracy.num_equal(), result.accuracy.num_prompts
        return f"{equal} of {asked} prompts gave the same logits, bit for bit."
    if result.overhead is not None:
        cost = "The cost of the cache when nothing can be reused"
        if not result.overhead.full_size:
            return f"{cost}: {TOO_SMALL}."
        return _in_short(cost, result.overhead.loss)
    if result.slow_disk is not None:
        return _in_short("The cost of a disk slower than computing", result.slow_disk.p50_loss)
    if result.store is not None:
        return store_sentence(result.store)
    assert result.overlap is not None
    return _in_short("The hidden share of a load", result.overlap.hidden(Case.FOLLOWED))


def store_sentence(result: StoreResult) -> str:
    """Return the savings of the store, in a sentence."""
    if result.saved is None:
        return "Nothing came from the store."
    return _in_short("Time to first token saved by the store", result.saved)


def subtitle(result: ServeResult) -> str:
    """Return what was done, in two sentences."""
    ttft, accuracy = result.ttft, result.accuracy
    if ttft is not None:
        end = "."
        if ttft.times_ms(3):
            end = f", and after {milliseconds(ttft.whole_pass(3).mean)} after a restart."
        return (
            f"{counted(ttft.num_prompts, 'prompt')} of {ttft.prompt_tokens:,} tokens of real text: "
            f"the answer began after {milliseconds(ttft.whole_pass(1).mean)} on average the first "
            f"time, after {milliseconds(ttft.whole_pass(2).mean)} the second time, when all but "
            f"the end of the prompt came from the cache{end}"
        )
    if accuracy is not None:
        return (
            f"{counted(accuracy.num_prompts, 'prompt')} of {accuracy.prompt_tokens:,} tokens of "
            "real text, once without and twice with reused KV."
        )
    if result.overhead is not None:
        return "New prompts, served alternately by an engine with the cache and one without."
    if result.slow_disk is not None:
        return "Prompts on a throttled disk, alternating with an engine without the cache."
    if result.store is not None:
        return "Prompts computed by one process, requested from another that has only the store."
    return "A long prompt from host memory, prefilled during its load and after it, alternately."


def _in_short(what: str, found: Estimate) -> str:
    """Return a sentence about a share."""
    if not found.is_bounded:
        return f"{what}: {TOO_FEW}."
    return f"{what}: {change(found) if found.contains(0) else about(found)}."


def _ttft(result: TtftResult) -> list[Verdict]:
    first, second = result.whole_pass(1), result.whole_pass(2)
    shares = " and ".join(
        f"{percent(len(result.times_ms(2, tier)) / result.num_prompts)} from {name}"
        for tier, name in ((DEVICE, "device"), (HOST, "host"))
    )
    found = [
        Verdict(
            "Time to first token",
            f"{milliseconds(first.mean)} \N{RIGHTWARDS ARROW} {milliseconds(second.mean)}"
            f"{in_brackets(result.reduction)}",
            f"Mean without the cache, and mean of a second pass served {shares}.",
        )
    ]
    for tier in WARM:
        summary, saved = result.summary(tier), result.reduction_from(tier)
        if summary is not None and saved is not None:
            found.append(
                Verdict(
                    PLACES[tier],
                    f"{milliseconds(summary.mean)}{in_brackets(saved)}",
                    f"{counted(len(result.times_from(tier)), 'request')}: half of them took at "
                    f"most {milliseconds(summary.p50)}, {_slow_ones(summary)}.",
                )
            )
    if again := len(result.times_ms(2, COLD)) + len(result.times_ms(3, COLD)):
        found.append(Verdict("Recomputed", counted(again, "request"), "They reused nothing."))
    if result.num_same < result.num_warm:
        wrong = counted(result.num_warm - result.num_same, "request")
        found.append(
            Verdict("Later passes", wrong, "Their logits differ from the first pass.", good=False)
        )
    return found


def _accuracy(result: AccuracyResult) -> list[Verdict]:
    asked = result.num_prompts
    equal = ", ".join(f"{result.num_equal(tier)} of {asked} from {tier}" for tier in TIERS)
    all_equal, all_noticed = result.num_equal() == asked, result.num_noticed() == asked
    return [
        Verdict(
            "Same logits",
            equal,
            f"All logits of {counted(result.steps, 'step')} are, bit for bit, those of a run "
            "without the cache."
            if all_equal
            else "Reused KV changed logits, or did not come from the tier that was asked.",
            good=all_equal,
        ),
        Verdict(
            "Damage noticed",
            f"{result.num_noticed()} of {asked}",
            "One wrong block, of each of three kinds, changes the logits: this comparison can fail."
            if all_noticed
            else "Some damaged blocks left the logits as they were: the comparison proves less.",
            good=all_noticed,
        ),
    ]


def in_brackets(saved: Estimate) -> str:
    """Return " (-95.3 %)" if enough was measured to say so."""
    if not saved.is_bounded:
        return ""
    return f" ({about(saved.changed(lambda each: -each), signed=True)})"


def _slow_ones(summary: Summary) -> str:
    """Return the tail of the distribution, as far as the number of requests supports it."""
    if summary.p99 is not None:
        return f"99 % at most {milliseconds(summary.p99)}"
    if summary.p90 is not None:
        return f"90 % at most {milliseconds(summary.p90)}, the slowest {milliseconds(summary.max)}"
    return f"the slowest {milliseconds(summary.max)}"


def _overhead(result: OverheadResult) -> Verdict:
    """Return medians and their intervals, from as many pairs as the target needs.

    Fewer pairs give no figure: a cost near 1 % is below the machine's noise.
    """
    pairs = f"{counted(len(result.rows), 'pair')} with the cache on and off"
    title, length = "Cost without reuse", f"prompts of {result.prompt_tokens:,} tokens"
    if not result.full_size:
        meaning = f"{pairs}, {length}. {FULL_PAIRS} pairs or more can tell."
        return Verdict(title, TOO_SMALL, meaning)
    ttft, throughput = _costs(result)
    meaning = f"Medians of {pairs}, {length}, and where they lie ({SURE})."
    return Verdict(title, f"first token {ttft}; throughput {throughput}", meaning)


def _slow_disk(result: SlowDiskResult) -> Verdict:
    return Verdict(
        "A disk slower than computing",
        f"median {change(result.p50_loss)}; p99 {change(result.p99_loss)}",
        f"Time to first token against an engine without the cache. Reading a prompt's KV would "
        f"take {milliseconds(1000 * result.load_s)}, computing it takes "
        f"{milliseconds(result.cold.p50)}.",
    )


def _overlap(result: OverlapResult) -> Verdict:
    times = {case: milliseconds(result.ttft_ms(case)) for case in Case}
    return Verdict(
        "Loading while computing",
        f"hidden: {change(result.hidden(Case.FOLLOWED))}"
        if result.all_same
        else "logits differ from a cold run",
        f"First token of {result.prompt_tokens:,} tokens: {times[Case.COLD]} cold, "
        f"{times[Case.DEVICE]} from the device, {times[Case.FOLLOWED]} from the host layer by "
        f"layer, {times[Case.AWAITED]} after a whole load of {milliseconds(result.load_ms)}. "
        f"Medians of {result.num_rounds}.",
        good=None if result.all_same else False,
    )


def _store(result: StoreResult) -> list[Verdict]:
    """Return the findings on the store."""
    asked, hits, warm, saved = len(result.rows), len(result.hits), result.warm, result.saved
    found = []
    if warm is not None and saved is not None:
        look_up = "no look-up was needed"
        if result.lookup_ms is not None:
            look_up = f"a look-up took {milliseconds(result.lookup_ms)}"
        found.append(
            Verdict(
                FROM_STORE,
                f"{milliseconds(warm.mean)}{in_brackets(saved)}",
                f"{hits} of {counted(asked, 'prompt')}, {result.num_bytes / 2**20:,.0f} MiB, "
                f"computed by another process; {look_up}; half of them took at most "
                f"{milliseconds(warm.p50)}, {_slow_ones(warm)}.",
            )
        )
    if hits < asked:
        found.append(
            Verdict(
                "Not from the store",
                counted(asked - hits, "prompt"),
                "They were recomputed: the store had no blocks of them, or loading was not faster.",
            )
        )
    if not result.all_same:
        wrong = sum(not row.same_logits for row in result.rows)
        found.append(
            Verdict(
                "With the store",
                counted(wrong, "prompt"),
                "Their logits differ from the first time.",
                good=False,
            )
        )
    return found


def conclusion(result: ServeResult) -> list[str]:
    """Return a paragraph per experiment and, after a quick run, the command of a full one."""
    found = []
    if result.ttft is not None:
        found += _ttft_concluded(result.ttft)
    if result.accuracy is not None:
        found.append(_accuracy_concluded(result.accuracy))
    if result.overhead is not None:
        found.append(_overhead_concluded(result.overhead))
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


def _ttft_concluded(result: TtftResult) -> list[str]:
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


def _accuracy_concluded(result: AccuracyResult) -> str:
    asked, equal = result.num_prompts, result.num_equal()
    if equal < asked:
        return (
            f"The answers differ: only {equal} of {asked} prompts had, from each tier, the logits "
            f"of a run without the cache. {WRONG}"
        )
    same = (
        f"Answers are identical: from device, host and disk, all logits of "
        f"{counted(asked, 'prompt')} were those of a run without the cache, bit for bit."
    )
    if result.num_noticed() < asked:
        return f"{same} But some blocks that were damaged on purpose were not noticed. {WRONG}"
    return f"{same} Blocks that were damaged on purpose were noticed each time."


def _overhead_concluded(result: OverheadResult) -> str:
    what = "Cost of the cache when nothing can be reused"
    if not result.full_size:
        pairs = counted(len(result.rows), "pair")
        return f"{what}: {TOO_SMALL}, {pairs} of runs where {FULL_PAIRS} are needed."
    ttft, throughput = _costs(result)
    return f"{what}: time to first token {ttft}, throughput {throughput}."


def _what_tells_more(options: ServeOptions) -> str:
    model = "" if options.model == ServeOptions().model else f" --model {options.model}"
    return (
        f"This was a quick run. {FULL_COMMAND}{model} measures at full size, on two cores in about "
        "ten minutes with the built-in model. To serve: kvtier serve."
    )


def _costs(result: OverheadResult) -> tuple[str, str]:
    """Return the changes of time to first token and of throughput by the cache."""
    ttft, throughput = (
        change(ratio.changed(lambda each: each - 1))
        for ratio in (result.ttft_ratio, result.throughput_ratio)
    )
    return ttft, throughput
