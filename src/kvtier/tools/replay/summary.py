"""Sentences and table cells of a replay, for the terminal, the JSON object and the report."""

from __future__ import annotations

from kvtier.index.policies.replayed import LRU, RUNS
from kvtier.tools.replay.assumptions import DEFAULT, HOURS_PER_YEAR
from kvtier.tools.replay.evidence import LEAST_TURNS
from kvtier.tools.replay.policies import OPTIMUM
from kvtier.tools.replay.result import HitPoint, ReplayResult, Setup
from kvtier.tools.replay.sizing import Point, SizeChoice
from kvtier.tools.report.figures import TOO_FEW, capacity, counted, duration, number, percent

CANT_TELL = "can't tell"
RECOMMENDED = "<- recommended"
WEAK = f"{CANT_TELL}: the trace is too small, or does not fill this size twice."
SIZE_COLUMNS = (
    "size",
    "hit ratio",
    "tokens/s saved",
    "prefill saved/h",
    "value, cost per hour",
    "added GiB: value, cost per month",
)
WRITTEN = "written/day"
POLICY_NAMES = {LRU: "LRU", RUNS: "learned (runs)", OPTIMUM: "optimum"}


def policy_name(name: str) -> str:
    return POLICY_NAMES.get(name, name)


def money(amount: float) -> str:
    """Format a price, such as "$1.20" or "$0.0031"."""
    sign = "\N{MINUS SIGN}" if amount < 0 else ""
    amount = abs(amount)
    return f"{sign}${amount:,.2f}" if amount >= 0.1 or not amount else f"{sign}${amount:.2g}"


def headline(result: ReplayResult) -> str:
    """Return the result of the replay in one short sentence."""
    if not result.evidence.has_contents:
        return "Lengths alone do not tell what a cache would save."
    if result.choice is None or not _judged(result):
        if not result.host and not result.evidence.weakness:
            return "The device pool holds the whole trace."
        return "Too small to tell."
    bought = _bought(result.choice)
    if not bought:
        return "No size of host memory or disk pays for itself."
    if not _is_sure(result):
        return f"{_capital(bought)} may pay, but too little is known to say so."
    return (
        f"{_capital(bought)} would pay for {'itself' if ' and ' not in bought else 'themselves'}."
    )


def subtitle(result: ReplayResult) -> str:
    """Return what was replayed, in two sentences."""
    facts = result.facts
    what = (
        f"{counted(facts.num_requests, 'request')} over {duration(facts.window_s)}, "
        f"{facts.tokens:,} prompt tokens in blocks of {facts.block_tokens}."
    )
    if not result.evidence.has_contents:
        return what
    return (
        f"{what} An unlimited "
        f"cache would hit {percent(facts.ceiling)} of the blocks and save "
        f"{percent(result.ceiling.time_ratio)} of the prefill time."
    )


def recommendation(result: ReplayResult) -> str:
    """Return the recommendation, its reasons and its evidence, as one text."""
    return " ".join(paragraphs(result))


def paragraphs(result: ReplayResult) -> list[str]:
    """Return the recommendation with its reasons, then its evidence."""
    refusal = _refusal(result)
    if refusal or result.choice is None:
        return [refusal]
    return [" ".join(_verdict(result, result.choice)), _basis(result)]


def _refusal(result: ReplayResult) -> str:
    """Return why nothing can be recommended, or ""."""
    evidence = result.evidence
    if not evidence.has_contents:
        return _by_lengths(result)
    if evidence.weakness:
        return (
            f"Too small to tell: {evidence.weakness}. Record more of your server's requests: "
            "some hours at least."
        )
    if not result.host:
        return (
            f"The device pool of {capacity(result.machine.device_bytes)} holds all distinct "
            f"blocks of this trace, {capacity(unique_bytes(result))}: no more memory is needed."
        )
    if not _judged(result):
        smallest = capacity(result.host[0].num_bytes)
        return (
            f"Too small to tell: the trace does not fill the smallest size, {smallest}, twice. "
            "Record more of your server's requests."
        )
    return ""


def _by_lengths(result: ReplayResult) -> str:
    """Return what follows from lengths and times alone, and what does not."""
    facts = result.facts
    text = (
        "Which prompts begin alike is not in the trace, so neither hits nor the worth of memory "
        "can be told. Computing all prompts takes "
        f"{duration(facts.computing_s)} of an accelerator"
    )
    if facts.window_s > 0:
        kv_bytes = facts.tokens * result.machine.bytes_per_token * 3600 / facts.window_s
        text += (
            f", {facts.computing_s / facts.window_s:.2g} accelerators on average; a cache saves "
            f"at most that. The prompts have {capacity(int(kv_bytes))} of KV an hour: of this size "
            "a cache keeps each block for an hour on average"
        )
    return f"{text}. To know more, record your server's requests (kvtier serve --record)."


def _basis(result: ReplayResult) -> str:
    evidence = result.evidence
    text = (
        f"Evidence: {counted(evidence.num_reuses, 'request')} that share a prefix with an "
        f"earlier one, over {duration(evidence.window_s)}; half of the reused blocks "
        f"are reused within {duration(evidence.age_p50_s or 0)}, 90 % within "
        f"{duration(evidence.age_p90_s or 0)}. Sizes are compared under the policy "
        f"{policy_name(result.policy)}, caches are empty at the start, and saved time has its "
        "price only if the accelerators have other work."
    )
    defaults = [
        assumption.name for assumption in result.assumptions if assumption.source == DEFAULT
    ]
    return f"{text} Assumed, not set by options: {', '.join(defaults)}." if defaults else text


def _verdict(result: ReplayResult, choice: SizeChoice) -> list[str]:
    bought = _bought(choice)
    if not bought:
        points = [point for point in (*result.host, *result.disk) if point.supported]
        best = max(points, key=lambda point: point.gain_per_gib)
        text = (
            "Buy neither host memory nor a disk for this: no size saves more than it costs. At "
            f"best a GiB saves {money(best.gain_per_gib)} a month, and costs "
            f"{money(best.price_per_gib)}."
        )
        return [text]
    assert result.gained is not None
    price = _price(choice)
    hour = result.machine.accelerator_price
    found = []
    sure = TOO_FEW
    if result.gained.is_bounded:
        sure = f"95 % sure: {number(max(0.0, result.gained.low))} to {number(result.gained.high)}"
    if _is_sure(result):
        found.append(f"Buy {bought}.")
    else:
        found.append(f"It can't be told whether {bought} would pay: the trace varies too much.")
    found.append(
        f"Each hour, this saves {duration(result.gained.value)} of accelerator time ({sure}), the "
        f"work of {accelerators(result.gained.value / 3600)}, worth "
        f"{money(result.gained.value / 3600 * hour)} at {money(hour)} an hour, for {money(price)} "
        f"an hour of memory paid off over {result.machine.years:g} years."
    )
    for what, point in (("host memory", choice.host), ("disk", choice.disk)):
        if point is not None:
            found.append(
                f"The last step to {capacity(point.num_bytes)} of {what} saves "
                f"{money(point.gain_per_gib)} per GiB and month, and costs "
                f"{money(point.price_per_gib)}."
            )
    if choice.disk is not None:
        found.append(
            f"The disk is written {capacity(choice.disk.written_per_day)} a day, "
            f"{number(choice.disk.drive_writes)} times its size{_worn(result, choice.disk)}."
        )
        if choice.host is None:
            found.append("kvtier also needs a little host memory as a read buffer.")
    if choice.at_edge:
        found.append(
            f"More may pay, too: sizes above {capacity(_supported_bytes(result))} are not filled "
            "twice by this trace, so their value is unknown."
        )
    largest = max(point.num_bytes for point in (choice.host, choice.disk) if point is not None)
    if largest == result.host[-1].num_bytes:
        found.append("More may pay, too: no larger size was simulated.")
    ours, best_point = _at(result, result.policy, largest), _at(result, OPTIMUM, largest)
    if ours is not None and best_point is not None:
        lru = _at(result, LRU, largest)
        beside = ""
        if lru is not None and result.policy != LRU:
            beside = f" (under LRU {percent(lru.hit_ratio)})"
        found.append(
            f"One {capacity(largest)} tier hits {percent(ours.hit_ratio)} of the blocks{beside}, "
            f"the optimum, which knows the future, {percent(best_point.hit_ratio)}."
        )
    return found


def hit_rows(result: ReplayResult, with_time: bool = True) -> list[list[str]]:
    """Return a row per size: hit ratio by policy, and of an unlimited cache.

    with_time: also the share of prefill time saved.
    """

    def cell(point: HitPoint) -> str:
        time = f", {percent(point.time_ratio, digits=0)}" if with_time else ""
        return percent(point.hit_ratio) + time

    return [
        [capacity(points[0].num_bytes), *map(cell, points), cell(result.ceiling)]
        for points in zip(*result.curves.values(), strict=True)
    ]


def can_tell(result: ReplayResult, point: Point) -> bool:
    """Whether the trace supports figures of a size."""
    return point.supported and not result.evidence.weakness


def size_mark(result: ReplayResult, point: Point, is_disk: bool) -> str:
    """Return the mark of a row in words, for output without colours."""
    chosen = result.best_disk if is_disk else result.best_host
    if chosen is not None and point.num_bytes == chosen.num_bytes:
        return RECOMMENDED
    return "" if can_tell(result, point) else CANT_TELL


def size_cells(result: ReplayResult, point: Point, is_disk: bool) -> list[str]:
    """Return the cells of ``SIZE_COLUMNS``, and of ``WRITTEN`` for a disk.

    Savings and their value are given only if the trace supports them.
    """
    saves = [number(point.tokens_per_s), duration(point.seconds_per_hour)]
    worth, more = money(point.saved), money(point.gain_per_gib)
    if not can_tell(result, point):
        saves, worth, more = ["–", "–"], "–", "–"
    cells = [
        capacity(point.num_bytes),
        percent(point.hit_ratio),
        *saves,
        f"{worth}, {money(point.price)}",
        f"{more}, {money(point.price_per_gib)}",
    ]
    if is_disk:
        cells.append(f"{capacity(point.written_per_day)}, {number(point.drive_writes)}×")
    return cells


def setup_cells(result: ReplayResult, setup: Setup) -> list[str]:
    """Return name, tiers, shares of prompt tokens by source, and time saved per hour."""
    all_tokens = result.facts.tokens or 1
    found = setup.savings.by_tier
    hours = result.facts.window_s / 3600
    return [
        setup.name,
        setup_words(setup),
        *(percent(each / all_tokens) for each in (*found, all_tokens - sum(found))),
        f"{duration(setup.savings.total_s / hours)}/h" if hours else "–",
    ]


def accelerators(count: float) -> str:
    """Return "1.7 accelerators", or "2.2 % of an accelerator" below one."""
    if count < 1:
        return f"{percent(count)} of an accelerator"
    return f"{number(count)} accelerators"


def _worn(result: ReplayResult, disk: Point) -> str:
    """Return when the disk is worn, if that is before it is paid off."""
    if not disk.drive_writes:
        return ""
    days = result.machine.disk_writes / disk.drive_writes
    if days >= result.machine.years * HOURS_PER_YEAR / 24:
        return ""
    life = f"{days:.0f} days" if days < 100 else f"{days / 365.25:.1f} years"
    return f", so it is worn after {life}: its cost is spread over that time"


def setup_words(setup: Setup) -> str:
    """Format the tiers of a setup, such as "16 GiB device, 64 GiB host, 1 TiB disk"."""
    tiers = (("device", setup.device_bytes), ("host", setup.host_bytes), ("disk", setup.disk_bytes))
    return ", ".join(f"{capacity(size)} {tier}" for tier, size in tiers if size) or "no cache"


def _bought(choice: SizeChoice) -> str:
    parts = []
    if choice.host is not None:
        parts.append(f"{capacity(choice.host.num_bytes)} of host memory")
    if choice.disk is not None:
        parts.append(f"{capacity(choice.disk.num_bytes)} of disk")
    return " and ".join(parts)


def _is_sure(result: ReplayResult) -> bool:
    """Whether the lower bound of the savings is worth more than the cost."""
    if result.gained is None or result.choice is None or not result.gained.is_bounded:
        return False
    return result.gained.low / 3600 * result.machine.accelerator_price > _price(result.choice)


def _price(choice: SizeChoice) -> float:
    """Return the cost per hour."""
    return sum(point.price for point in (choice.host, choice.disk) if point is not None)


def _judged(result: ReplayResult) -> list[Point]:
    return [point for point in result.host if point.supported]


def _at(result: ReplayResult, policy: str, num_bytes: int) -> HitPoint | None:
    points = result.curves.get(policy, ())
    return next((point for point in points if point.num_bytes == num_bytes), None)


def _block_bytes(result: ReplayResult) -> int:
    return result.facts.block_tokens * result.machine.bytes_per_token


def unique_bytes(result: ReplayResult) -> int:
    """Return the bytes of the distinct blocks of the trace."""
    return result.facts.num_unique * _block_bytes(result)


def _supported_bytes(result: ReplayResult) -> int:
    return unique_bytes(result) // LEAST_TURNS


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
