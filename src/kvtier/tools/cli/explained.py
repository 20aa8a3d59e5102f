"""Show an explanation of ``X-KVTier-Explain`` as a table and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtier.core.errors import printable
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.observe.live import wording
from kvtier.plan.explain import COMPUTED

Found = Mapping[str, Any]
"""Explanation as the server sends it."""

_SECONDS = (int, float, type(None))
_SHAPE = {
    "prompt_tokens": int,
    "reused_tokens": int,
    "parts": [
        {
            "first": int,
            "end": int,
            "from": str,
            "measured": (int, type(None)),
            "predicted_s": _SECONDS,
            "took_s": _SECONDS,
            "compute_s": _SECONDS,
        }
    ],
    "not_used": [{"first": int, "end": int, "in": str}],
    "rejected": [{"reused_tokens": int, "load_s": _SECONDS, "compute_s": _SECONDS}],
    "predicted": {"load_s": _SECONDS, "compute_s": _SECONDS},
    "took": {"load_s": _SECONDS, "first_token_s": _SECONDS, "wait_s": _SECONDS},
    "notes": [str],
    "too_few_measurements": [{"of": str, "number": int}],
}
"""Shape of the explanation that ``show`` reads; a list has elements of one shape."""
MAX_ROWS = 10_000
MAX_NUMBER = 2**63
MAX_TEXT = 1000


def is_explanation(value: Any) -> bool:
    """Whether a server's answer has the shape, and the size, that ``show`` needs."""
    return _fits(value, _SHAPE)


def _fits(value: Any, shape: Any) -> bool:
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(
            name in value and _fits(value[name], each) for name, each in shape.items()
        )
    if isinstance(shape, list):
        is_list = isinstance(value, list) and len(value) <= MAX_ROWS
        return is_list and all(_fits(each, shape[0]) for each in value)
    if not isinstance(value, shape) or isinstance(value, bool):
        return False
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return value is None or 0 <= value < MAX_NUMBER


PLACES = {DEVICE: "device memory", HOST: "host memory", DISK: "disk", COMPUTED: "computed"}


def show(found: Found, what: str, console: Console) -> None:
    """Print an explanation as a table and sentences. what: the model and server, for the title."""
    num, reused = found["prompt_tokens"], found["reused_tokens"]
    console.print(f"{printable(what)}: {num:,} tokens, {reused:,} of them reused\n")
    console.print(_table(found))
    for sentence in sentences(found):
        console.print(sentence)


def _table(found: Found) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("tokens")
    table.add_column("from")
    for name in ("expected", "took", "if computed"):
        table.add_column(name, justify="right")
    for part in found["parts"]:
        is_there = part["from"] == DEVICE
        table.add_row(
            span(part),
            place(part["from"]),
            "-" if is_there else _expected(part),
            "-" if is_there else seconds(part["took_s"]),
            "" if part["from"] == COMPUTED else about(part["compute_s"]),
        )
    return table


def sentences(found: Found) -> Iterator[str]:
    """Yield the sentences below the table."""
    yield ""
    yield from _times(found)
    weak = found["too_few_measurements"]
    loaded = [part for part in found["parts"] if part["from"] not in (DEVICE, COMPUTED)]
    took_s, instead_s = found["took"]["load_s"], _total(loaded, "compute_s")
    if loaded and took_s is not None and instead_s is not None:
        num = sum(part["end"] - part["first"] for part in loaded)
        yield (
            f"Loading {num:,} tokens took {seconds(took_s)}; computing them would have taken "
            f"{about(instead_s)}."
        )
    for cut in found["rejected"]:
        yield _rejected(cut, found)
    for part in found["not_used"]:
        yield f"Not used: tokens {span(part)}, found in {place(part['in'])}."
    for note in found["notes"]:
        yield f"{printable(note[:1].upper() + note[1:])}."
    if weak:
        named = ", ".join(f"{printable(each['of'])} ({each['number']})" for each in weak)
        yield (
            f"Too few measurements to rely on the estimates for: {named}. They get better with "
            "every request."
        )


def _times(found: Found) -> Iterator[str]:
    took = found["took"]
    if took["first_token_s"] is not None:
        waited = ""
        if took["wait_s"] is not None:
            waited = f", {seconds(took['wait_s'])} of it until its turn came"
        yield f"First token after {seconds(took['first_token_s'])}{waited}."


def _rejected(cut: Mapping[str, Any], found: Found) -> str:
    total_s = _sum(cut["load_s"], cut["compute_s"])
    is_known = all(part["measured"] != 0 for part in found["parts"])
    chosen = _sum(found["predicted"]["load_s"], found["predicted"]["compute_s"])
    tokens = cut["reused_tokens"]
    what = f"reusing {tokens:,} tokens" if tokens else "reusing nothing"
    if total_s is None:
        return f"Compared with {what}: its cost is not known yet."
    if not is_known:
        return f"Compared with {what}: {about(total_s)}. What was done was never measured: a try."
    parts = f" ({about(cut['load_s'])} to load, {about(cut['compute_s'])} to compute)"
    return (
        f"Compared with {what}: {about(total_s)}{parts if cut['load_s'] else ''}, against "
        f"{about(chosen)} for what was done."
    )


def _expected(part: Mapping[str, Any]) -> str:
    """Return the expected time in words.

    It is unknown if the route was never measured: the planner treats it as free, so that it is
    tried.
    """
    return "unknown" if part["measured"] == 0 else seconds(part["predicted_s"])


def _sum(*values: float | None) -> float | None:
    return None if None in values else sum(value for value in values if value is not None)


def _total(parts: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return _sum(*(part[name] for part in parts))


def span(part: Mapping[str, Any]) -> str:
    """Format a range of tokens, such as "0-1,023"."""
    return f"{part['first']:,}-{part['end'] - 1:,}"


def place(tier: str) -> str:
    """Return a tier's name for people who have not read the guide."""
    return PLACES.get(tier, f"store {printable(tier)}")


def seconds(value: float | None) -> str:
    """Format a time; "?" for an unknown one."""
    return "?" if value is None else wording.seconds(value)


def about(value: float | None) -> str:
    """Format an estimated time."""
    return seconds(value) if value is None else f"about {seconds(value)}"
