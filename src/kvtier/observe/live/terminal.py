"""Draw a picture in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kvtier.observe.live.scrape import ScrapeResult
from kvtier.observe.live.wording import TOO_FEW, count, seconds, share, size

STATES = {
    0: Text("in use", "green"),
    1: Text("being retried", "yellow"),
    2: Text("paused after errors", "red"),
    3: Text("slab cut short", "red"),
}
COLOURS = {"good": "green", "plain": "default", "bad": "red"}
ON_DISK = ("slab", "disk_floor", "disk_ceiling")
NOTHING = Text("–", "dim")


class Fitted:
    """Renderable cut to the terminal's height; the last line says how much was cut."""

    def __init__(self, whole: RenderableType) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._whole, options.update(height=None), pad=False)
        num_shown = len(lines) if len(lines) <= console.height else console.height - 1
        for line in lines[:num_shown]:
            yield from line
            yield Segment.line()
        if num_shown < len(lines):
            num_cut = len(lines) - num_shown
            yield Text(f"{num_cut} more lines: enlarge the terminal, or use --once", "yellow")


def draw(seen: ScrapeResult, url: str) -> RenderableType:
    """Return a drawing of the picture, or the reason why there is none."""
    if seen.picture is None:
        return Text(f"{seen.error or url}. Retrying …", "yellow")
    picture = seen.picture
    parts: list[RenderableType] = [_head(picture, url), Text(), _tiers(picture)]
    if picture["node"] is not None:
        for table in _of_node(picture["node"]):
            parts += [Text(), table]
    return Group(*parts, *_answers(picture), Text(), _flows(picture))


def _head(picture: Mapping[str, Any], url: str) -> Text:
    asked, saved = picture["requests"], picture["saved"]
    head = Text.assemble((f"{picture['engine']} ", "bold"), (url, "dim"))
    if picture["has_restarted"]:
        head.append(f"  restarted {seconds(picture['age_s'])} ago", "yellow")
    server = picture["server"]
    for name, value in (
        ("model", ", ".join(server["models"])),
        ("kvtier", server["version"]),
        ("up", "" if server["uptime_s"] is None else seconds(server["uptime_s"])),
    ):
        if value:
            head.append(f"  {name} {value}", "dim")
    head.append("\n")
    node = picture["node"]
    told = (
        (
            ("engine" if len(node["engines"]) == 1 else "engines", _number(len(node["engines"]))),
            ("waiting", _number(asked["waiting"])),
            ("look-ups/s", TOO_FEW if asked["per_s"] is None else f"{asked['per_s']:.3g}"),
            ("look-up time", _time(node["lookup_s"], node["lookup_p95_s"])),
            ("found", share(picture["hit_share"]["recent"])),
            ("memory free", f"{size(node['free_bytes'])} of {size(node['memory_bytes'])}"),
        )
        if node is not None
        else (
            ("running", _number(asked["running"])),
            ("waiting", _number(asked["waiting"])),
            ("time to first token", _time(asked["ttft_s"], asked["ttft_p95_s"])),
            ("from cache", share(picture["hit_share"]["recent"])),
            ("prefill time saved", _saved(saved)),
        )
    )
    for name, value in told:
        head.append(f"{name} ", "dim")
        head.append(f"{value}   ", "dim" if value == TOO_FEW else "bold")
    return head


def _saved(saved: Mapping[str, Any]) -> str:
    """Format the prefill time saved so far, and the current rate in engines' worth of compute."""
    if saved["seconds"] is None:
        return "–"
    text = seconds(saved["seconds"])
    engines = saved["seconds_per_s"]
    return text if engines is None else f"{text} (now {engines:.2g} engine{'s' * (engines != 1)})"


def _time(mean: float | None, p95: float | None) -> str:
    return seconds(mean) if p95 is None else f"{seconds(mean)} (p95 {seconds(p95)})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _tiers(picture: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("tier", "hit share", "capacity", "in use", ""):
        table.add_column(name, min_width=_longest(name))
    for name in ("evicted/s", "requested again", "damaged", "audited"):
        table.add_column(name, justify="right", min_width=_longest(name))
    table.add_column("state")
    hits = {each["tier"]: each["recent"] for each in picture["hits"]}
    for tier in picture["tiers"]:
        name, fill, wrong = tier["name"], tier["fill"], tier["different"]
        table.add_row(
            Text(name),
            share(hits[name]) if name in hits else NOTHING,
            _capacity(tier),
            NOTHING if fill is None else share(fill),
            "" if fill is None else ProgressBar(1.0, fill, width=12),
            NOTHING if tier["evicted_per_s"] is None else f"{tier['evicted_per_s']:.1f}",
            share(tier["returned"]) if tier["evicted"] else NOTHING,
            count(tier["damaged"]),
            count(tier["audited"]) + f", {count(wrong)} different" * bool(wrong),
            STATES.get(tier["left_alone"], ""),
        )
    return table


def _of_node(node: Mapping[str, Any]) -> Iterator[Table]:
    """Yield tables of a node's engines, tenants and rooms."""
    table = _table(
        ("engine", "tenant"), ("processes", "slots in use", "waiting", "late calls", "pauses")
    )
    for each in node["engines"]:
        told = (each[key] for key in ("processes", "slots", "waiting", "failures", "pauses"))
        table.add_row(Text(each["name"]), Text(each["tenant"]), *map(count, told))
    yield table
    uses = [each["used_bytes"] for each in (*node["tenants"], *node["rooms"])]
    tiers = list(dict.fromkeys(tier for use in uses for tier in use))
    quotas = ["memory", "pinned", "floor", "ceiling"]
    if any(each[f"{quota}_bytes"] for each in node["tenants"] for quota in ON_DISK):
        quotas += ON_DISK
    heads = (quota.replace("_", " ") for quota in quotas)
    table = _table(("tenant",), ("engines", "found", *heads, *tiers))
    for each in node["tenants"]:
        told = (each[f"{quota}_bytes"] for quota in quotas)
        table.add_row(
            Text(each["name"]),
            count(each["engines"]),
            share(each["found"]),
            *("none" if num_bytes is None else size(num_bytes) for num_bytes in told),
            *(size(each["used_bytes"].get(tier, 0.0)) for tier in tiers),
        )
    yield table
    table = _table(("room", "tenant"), ("block size", "segments", *tiers))
    for each in node["rooms"]:
        used = (each["used_bytes"].get(tier, 0.0) for tier in tiers)
        names = Text(each["name"]), Text(each["tenant"])
        table.add_row(*names, size(each["block_bytes"]), count(each["segments"]), *map(size, used))
    yield table


def _table(names: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, min_width=_longest(name))
    for name in numbers:
        table.add_column(name, justify="right", min_width=_longest(name))
    return table


def _longest(head: str) -> int:
    """Return the length of the longest word of a head, below which it would be cut."""
    return max(map(len, head.split()), default=4)


def _capacity(tier: Mapping[str, Any]) -> str:
    """Format a tier's capacity, in bytes if the engine reports them, else in blocks."""
    if tier["capacity_bytes"] is not None:
        return size(tier["capacity_bytes"])
    return "–" if tier["slots"] is None else f"{count(tier['slots'])} blocks"


def _flows(picture: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("transfer")
    for name in ("now", "total", "in flight", "queue"):
        table.add_column(name, justify="right", min_width=_longest(name))
    for flow in picture["flows"]:
        line = "–" if flow["queued_s"] is None else seconds(flow["queued_s"])
        table.add_row(
            Text(f"{flow['src']} → {flow['dst']}"),
            "–" if flow["bytes_per_s"] is None else f"{size(flow['bytes_per_s'])}/s",
            size(flow["num_bytes"]),
            _number(flow["in_flight"]),
            Text("paused", "red") if flow["is_refused"] else line,
        )
    return table


def _answers(picture: Mapping[str, Any]) -> Iterator[Text]:
    for each in picture["answers"]:
        yield Text.assemble(
            "\n", (each["question"], "bold"), " ", (each["text"], COLOURS[each["level"]])
        )
