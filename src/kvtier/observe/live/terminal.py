"""Draw a picture in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kvtier.observe.live.scrape import ScrapeResult
from kvtier.observe.live.wording import TOO_FEW, count, engines, seconds, share, size

STATES = {
    0: Text("in use", "green"),
    1: Text("being retried", "yellow"),
    2: Text("paused after errors", "red"),
    3: Text("slab cut short", "red"),
}
COLOURS = {"good": "green", "plain": "default", "bad": "red"}
ON_DISK = ("slab", "disk_floor", "disk_ceiling")
NOTHING = Text("–", "dim")
BAR = 12
"""Characters of a bar."""
GAP = 2
"""Characters between columns."""


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


@dataclass(frozen=True)
class Column:
    """Column of a table. is_spare: left out where the terminal is narrow."""

    head: str
    cells: Sequence[RenderableType]
    justify: Literal["left", "right"] = "left"
    is_spare: bool = False

    def width(self, console: Console) -> int:
        """Return the width at which no cell is wrapped, and the head only between its words."""
        cells = (console.measure(cell).maximum for cell in self.cells)
        return max((*map(len, self.head.split()), *cells), default=0)


class Columns:
    """Table that is continued below itself where the terminal is too narrow for it.

    num_names: number of first columns, which are repeated there.
    """

    def __init__(self, *columns: Column, num_names: int = 1) -> None:
        self._columns = columns
        self._num_names = num_names

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, most = [*self._columns], options.max_width
        if _width(columns, console) > most:
            columns = [column for column in columns if not column.is_spare]
        names, rest = columns[: self._num_names], columns[self._num_names :]
        while rest:
            part = [*names, rest.pop(0)]
            while rest and _width([*part, rest[0]], console) <= most:
                part.append(rest.pop(0))
            yield _drawn(part, console)
            if rest:
                yield Text()


def _width(columns: Sequence[Column], console: Console) -> int:
    return sum(column.width(console) + GAP for column in columns) - GAP


def _drawn(columns: Sequence[Column], console: Console) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))
    for column in columns:
        table.add_column(column.head, justify=column.justify, width=column.width(console))
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table


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
    rate = saved["seconds_per_s"]
    return text if rate is None else f"{text} (now {engines(rate)})"


def _time(mean: float | None, p95: float | None) -> str:
    return seconds(mean) if p95 is None else f"{seconds(mean)} (p95 {seconds(p95)})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _tiers(picture: Mapping[str, Any]) -> Columns:
    tiers = picture["tiers"]
    hits = {each["tier"]: each["recent"] for each in picture["hits"]}
    fills = [tier["fill"] for tier in tiers]
    states = [STATES.get(tier["left_alone"], "") for tier in tiers]
    return Columns(
        Column("tier", [Text(tier["name"]) for tier in tiers]),
        Column("hit share", [_share(hits.get(tier["name"])) for tier in tiers]),
        Column("capacity", [_capacity(tier) for tier in tiers]),
        Column("in use", [_share(fill) for fill in fills]),
        Column(
            "",
            ["" if fill is None else ProgressBar(1.0, fill, width=BAR) for fill in fills],
            is_spare=True,
        ),
        Column(
            "evicted/s",
            [
                NOTHING if tier["evicted_per_s"] is None else f"{tier['evicted_per_s']:.1f}"
                for tier in tiers
            ],
            "right",
        ),
        Column(
            "requested again",
            [_share(tier["returned"] if tier["evicted"] else None) for tier in tiers],
            "right",
        ),
        Column("damaged", [count(tier["damaged"]) for tier in tiers], "right"),
        Column("audited", [_audited(tier) for tier in tiers], "right"),
        *([Column("state", states)] if any(states) else ()),
    )


def _share(part: float | None) -> RenderableType:
    return NOTHING if part is None else share(part)


def _audited(tier: Mapping[str, Any]) -> str:
    wrong = tier["different"]
    return count(tier["audited"]) + f", {count(wrong)} different" * bool(wrong)


def _of_node(node: Mapping[str, Any]) -> Iterator[Columns]:
    """Yield tables of a node's engines, tenants and rooms."""
    yield _table(
        {"engine": "name", "tenant": "tenant"},
        ("processes", "slots in use", "waiting", "late calls", "pauses"),
        node["engines"],
        lambda each: [
            count(each[key]) for key in ("processes", "slots", "waiting", "failures", "pauses")
        ],
    )
    uses = [each["used_bytes"] for each in (*node["tenants"], *node["rooms"])]
    tiers = list(dict.fromkeys(tier for use in uses for tier in use))
    quotas = ["memory", "pinned", "floor", "ceiling"]
    if any(each[f"{quota}_bytes"] for each in node["tenants"] for quota in ON_DISK):
        quotas += ON_DISK
    heads = [quota.replace("_", " ") for quota in quotas]

    def of_tenant(each: Mapping[str, Any]) -> list[RenderableType]:
        bounds = (each[f"{quota}_bytes"] for quota in quotas)
        return [
            count(each["engines"]),
            _share(each["found"]),
            *("none" if num_bytes is None else size(num_bytes) for num_bytes in bounds),
            *used(each),
        ]

    def used(each: Mapping[str, Any]) -> list[RenderableType]:
        return [size(each["used_bytes"].get(tier, 0.0)) for tier in tiers]

    yield _table(
        {"tenant": "name"}, ("engines", "found", *heads, *tiers), node["tenants"], of_tenant
    )
    yield _table(
        {"room": "name", "tenant": "tenant"},
        ("block size", "segments", *tiers),
        node["rooms"],
        lambda each: [size(each["block_bytes"]), count(each["segments"]), *used(each)],
    )


def _table(
    names: Mapping[str, str],
    heads: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    numbers: Callable[[Mapping[str, Any]], Sequence[RenderableType]],
) -> Columns:
    """Return a table. names: heads of columns of text, and the rows' keys of them."""
    cells = list(zip(*map(numbers, rows), strict=True)) or [()] * len(heads)
    return Columns(
        *(Column(head, [Text(row[key]) for row in rows]) for head, key in names.items()),
        *(Column(head, of, "right") for head, of in zip(heads, cells, strict=True)),
        num_names=len(names),
    )


def _capacity(tier: Mapping[str, Any]) -> str:
    """Format a tier's capacity, in bytes if the engine reports them, else in blocks."""
    if tier["capacity_bytes"] is not None:
        return size(tier["capacity_bytes"])
    return "–" if tier["slots"] is None else f"{count(tier['slots'])} blocks"


def _flows(picture: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("transfer")
    for name in ("now", "total", "in flight", "queue"):
        table.add_column(name, justify="right")
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
