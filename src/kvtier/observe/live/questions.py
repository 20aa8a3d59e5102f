"""Answers to an operator's questions about a cache, from a picture."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier.core.types import DEVICE
from kvtier.observe.live.dialects import KVTIER, NODE
from kvtier.observe.live.picture import NodePicture, PageAnswer, Picture, Tier
from kvtier.observe.live.wording import TOO_FEW, count, engines, seconds, share, size

LONG_QUEUE_S = 0.5
"""Least queueing delay that is reported as slow."""
WRONG_RATIO = 1.5
"""Least ratio of actual to expected duration that is reported as slow."""
MANY_RETURN = 0.3
"""Least share of evicted blocks requested again for which a larger tier is recommended."""
WORTH_SHARE = 0.05
QUIET_S = 15.0
"""Least time without a request for which the busy minute is not called the last one."""
LATE_LOOKUP_S = 5e-3
"""Longest time of 99 look-ups in 100 that is not reported as slow: engines wait no longer."""


def answer(picture: Picture) -> Iterator[PageAnswer]:
    """Yield the answers, in the order of display."""
    if not picture.has_cache:
        said = "This engine reports no kvtier metrics: it runs without kvtier, or without metrics."
        yield PageAnswer("Is it on?", said, "bad")
        return
    yield _worth(picture)
    if any(tier.audited for tier in picture.tiers):
        yield _right(picture)
    yield _now(picture)
    yield _slow(picture)
    yield _buy(picture)


def _begun_large(text: str) -> str:
    return text[:1].upper() + text[1:]


def _worth(picture: Picture) -> PageAnswer:
    question, saved, node = "Is it worth its memory?", picture.saved, picture.node
    recent, ever = picture.hit_share.recent, picture.hit_share.ever
    if ever is None:
        asked = "looked up" if node is not None else "requested"
        text = f"{TOO_FEW.capitalize()}: not enough was {asked} yet."
        return PageAnswer(question, text, "plain")
    is_worth = max(recent or 0.0, ever) >= WORTH_SHARE
    when = "since the server's start" if recent is None else minute(picture)
    what = "of prompt tokens came from the cache"
    if node is not None:
        what = "of the blocks that engines looked up were here"
    text = f"{share(ever if recent is None else recent)} {what} {when}."
    if saved.seconds:
        text += f" Since its start the server saved {seconds(saved.seconds)} of prefill time, less "
        text += "the time spent loading"
        if saved.seconds_per_s is not None and picture.window_s >= 10:
            when = minute(picture) if recent is None else "in that minute"
            text += f"; {when} as much as {engines(saved.seconds_per_s)} like this compute"
        text += "."
    elif saved.tokens:
        text += f" Since its start {count(saved.tokens)} prompt tokens were not recomputed."
    if not is_worth:
        text += " Prompts share few prefixes, or blocks are evicted before they are needed again."
    return PageAnswer(question, text, "good" if is_worth else "plain")


def minute(picture: Picture) -> str:
    """Return the words for the busy minute at the moment of a picture."""
    is_now = picture.quiet_s is None or picture.quiet_s < QUIET_S
    return "in the last minute" if is_now else "in the minute before the last request"


def _right(picture: Picture) -> PageAnswer:
    question, num = "Is its KV right?", sum(tier.audited for tier in picture.tiers)
    wrong = [f"{count(tier.different)} in {tier.name}" for tier in picture.tiers if tier.different]
    text = f"{count(num)} hits were audited; "
    if wrong:
        text += f"not what the model computes: {', '.join(wrong)}. The log has the likely cause."
        return PageAnswer(question, text, "bad")
    return PageAnswer(question, text + "all were what the model computes.", "good")


def _now(picture: Picture) -> PageAnswer:
    asked = picture.requests
    parts = list(_uses(picture.node))
    if asked.running is not None and asked.waiting is not None:
        noun = "request" if asked.running == 1 else "requests"
        parts.append(f"{asked.running:.0f} {noun} running, {asked.waiting:.0f} waiting")
    moving = [
        f"{flow.src} → {flow.dst} {size(flow.bytes_per_s)}/s"
        for flow in picture.flows
        if flow.bytes_per_s
    ]
    parts.append("transfers: " + ", ".join(moving) if moving else "no transfers between tiers")
    return PageAnswer("What does it do right now?", _begun_large("; ".join(parts)) + ".", "plain")


def _uses(node: NodePicture | None) -> Iterator[str]:
    """Say who uses a node."""
    if node is None:
        return
    num = len(node.engines)
    yield f"{num or 'no'} engine{'s' if num != 1 else ''} attached"
    if node.lookups_per_s is not None:
        yield f"{node.lookups_per_s:.3g} look-ups per second"
    waiting = sum(engine.waiting for engine in node.engines)
    yield f"{waiting:.0f} requests wait for storage" if waiting else "no request waits"


def _slow(picture: Picture) -> PageAnswer:
    question, reasons = "Why was this slow?", list(_reasons(picture))
    if reasons:
        return PageAnswer(question, _begun_large(" ".join(reasons)), "bad")
    text = "Nothing here delays requests: all storage is in use, and no queue is long"
    loads = [guess for guess in picture.guesses if guess.what != "prefill"]
    if any(guess.ratio is not None for guess in loads):
        text += ". Loads take no longer than expected"
    elif loads:
        text += f". Loads {minute(picture)} were {TOO_FEW} whether they take as long as expected"
    return PageAnswer(question, text + ".", "good")


def _reasons(picture: Picture) -> Iterator[str]:
    for engine in picture.node.engines if picture.node is not None else ():
        if engine.pauses_recently:
            yield (
                f"{engine.name} did not wait for the node any longer in the last minute, and "
                "computed for a while: calls were not answered in time."
            )
    if picture.node is not None and (picture.node.late_lookup_s or 0) > LATE_LOOKUP_S:
        yield f"1 look-up of 100 takes longer than {seconds(LATE_LOOKUP_S)}."
    for tier in picture.tiers:
        if tier.left_alone == 2:
            yield f"{tier.name} failed repeatedly and is paused: requests compute instead."
        elif tier.left_alone == 1:
            yield f"{tier.name} failed and is being retried."
        elif tier.left_alone == 3:
            yield (
                f"{tier.name}: the slab's data file is shorter than it was. Find out what cut it, "
                "then restart the server: the slab gets its length back, and the blocks that were "
                "cut off are computed again."
            )
        if tier.damaged_recently:
            noun = "block" if tier.damaged_recently == 1 else "blocks"
            num = count(tier.damaged_recently)
            yield f"{tier.name} returned {num} damaged {noun} in the last minute."
    for flow in picture.flows:
        if flow.queued_s is not None and flow.queued_s >= LONG_QUEUE_S:
            yield f"{flow.src} → {flow.dst} has a queue of {seconds(flow.queued_s)}."
    for guess in picture.guesses:
        if guess.ratio is not None and guess.ratio > WRONG_RATIO:
            what = "prefill" if guess.what == "prefill" else f"loading from {guess.what}"
            yield f"{what.capitalize()} took {guess.ratio:.2g} times as long as expected."
    if picture.late_loads_recently:
        num = count(picture.late_loads_recently)
        yield f"{num} loads missed their deadline in the last minute; requests computed instead."
    declined, loaded = picture.recomputed_recently or 0, picture.loaded_recently or 0
    if declined > loaded and declined >= 100:
        yield (
            f"{count(declined)} cached blocks were recomputed in the last minute, because that is "
            "faster than loading them."
        )


def _buy(picture: Picture) -> PageAnswer:
    question = "What should I buy?"
    told = [tier for tier in picture.tiers if tier.returned is not None]
    wanting = [tier for tier in told if (tier.returned or 0) >= MANY_RETURN]
    recorders = {KVTIER.engine: "kvtier serve --record", NODE.engine: "a recording of an engine"}
    record = recorders.get(picture.engine, "kvtier record")
    end = f" See the sizing guide: {record}, then kvtier replay."
    if wanting:
        text = " ".join(map(_returned, wanting))
        return PageAnswer(question, f"{text} A larger tier would have kept them.{end}", "plain")
    if told:
        return PageAnswer(
            question, f"Nothing yet: few evicted blocks are requested again.{end}", "good"
        )
    full = [tier.name for tier in picture.tiers if (tier.fill or 0) > 0.95 and tier.name != DEVICE]
    if full:
        text = f"{TOO_FEW.capitalize()}: few blocks were evicted from {' and '.join(full)}."
    else:
        text = f"{TOO_FEW.capitalize()}: hardly any block was evicted for lack of room."
    return PageAnswer(question, text + end, "plain")


def _returned(tier: Tier) -> str:
    of_size = f" ({size(tier.capacity_bytes)})" if tier.capacity_bytes is not None else ""
    text = f"{share(tier.returned)} of the blocks evicted from {tier.name}{of_size} were "
    text += "requested again"
    if tier.return_s is not None:
        text += f", half of them within {seconds(tier.return_s)}"
    return text + "."
