"""Metrics of a hostile or broken engine, as a picture, as JSON and in a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path
from random import Random

from rich.console import Console

from kvtier.observe.live.history import History
from kvtier.observe.live.reading import Reading, UnreadableError
from kvtier.observe.live.scrape import ScrapeResult
from kvtier.observe.live.terminal import draw

OUTCOMES = frozenset({"shown", "refused"})
RECORDED = Path(__file__).parents[2] / "observe" / "live" / "recorded"
TEXTS = [path.read_text() for path in sorted(RECORDED.glob("*.txt"))]
VALUES = (
    *("0", "1", "-1", "NaN", "+Inf", "-Inf", "Infinity", "1e308", "1e-320", "9e18", "0x10"),
    *("1_0", "", "many", "9" * 5000, "1 2 3", "1 Inf", "1 NaN", "2.5"),
)
LABELS = (
    *("", "disk", "host", "[/x]", "[bold]", "\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\u202e"),
    *("\\n", '\\"', "\\", "x" * 5000, "-1", "nan", "+Inf", "é", "\0", "}", ",", "="),
)
NAMES = (
    *("kvtier_breaker_state", "kvtier_slots", "kvtier_queued_seconds"),
    *("kvtier_saved_seconds_total", "kvtier_used_slots"),
    *("kvtier_return_seconds_bucket", "kvtier_return_seconds_count"),
    *("kvtier_returned_blocks_total", "kvtier_evicted_blocks_total", "kvtier_damaged_blocks_total"),
    *("kvtier_hit_blocks_total", "kvtier_prompt_blocks_total", "kvtier_copied_bytes_total"),
)


def attempt(rng: Random, folder: Path) -> str:
    """Show what two texts of one engine come to."""
    history = History()
    number = rng.randrange(len(TEXTS) // 2) * 2
    for turn, text in enumerate(TEXTS[number : number + 2]):
        for change in rng.choices(CHANGES, WEIGHTS, k=rng.choice((0, 1, 1, 2))):
            text = change(text, rng)
        try:
            reading = Reading.parse(text, turn * rng.choice((0.1, 2.0, 60.0, 1e6)))
        except UnreadableError as error:
            sentence = str(error)
            break
        history.add(reading)
    else:
        return _show(history, rng)
    assert sentence.isprintable()
    assert len(sentence) < 200
    return "refused"


def _show(history: History, rng: Random) -> str:
    picture = history.picture()
    plain = picture.as_json()
    assert len(json.dumps(plain, allow_nan=False)) < 1 << 20
    shown = io.StringIO()
    Console(file=shown, width=rng.choice((40, 120))).print(draw(ScrapeResult(plain), "url"))
    assert shown.getvalue().replace("\n", "").isprintable()
    return "shown"


def _lines(text: str, rng: Random) -> tuple[list[str], int]:
    lines = text.split("\n")
    return lines, rng.randrange(len(lines))


def _value(text: str, rng: Random) -> str:
    """Change values of some lines."""
    lines, _ = _lines(text, rng)
    for at in rng.sample(range(len(lines)), min(len(lines), 5)):
        if not lines[at].startswith("#"):
            lines[at] = lines[at].rpartition(" ")[0] + " " + rng.choice(VALUES)
    return "\n".join(lines)


def _label(text: str, rng: Random) -> str:
    """Change the value of one label everywhere, or drop the label."""
    wanted = rng.choice(('tier="', 'src="', 'dst="', 'le="', 'decision="'))
    first = text.partition(wanted)[2].partition('"')[0]
    if rng.random() < 0.2:
        return text.replace(f'{wanted}{first}"', "")
    return text.replace(f'{wanted}{first}"', f'{wanted}{rng.choice(LABELS)}"')


def _line(text: str, rng: Random) -> str:
    """Add lines with any name, label and value."""
    lines, at = _lines(text, rng)
    labels = "tier", "src", "dst", "le", "x"
    lines[at:at] = [
        f'{rng.choice(NAMES)}{{{rng.choice(labels)}="{rng.choice(LABELS)}"}} {rng.choice(VALUES)}'
        for _ in range(rng.randrange(1, 10))
    ]
    return "\n".join(lines)


def _cut(text: str, rng: Random) -> str:
    return text[: rng.randrange(len(text) + 1)]


def _many(text: str, rng: Random) -> str:
    """Add thousands of tiers, series, or metrics."""
    num, name = rng.choice((10, 3000)), rng.choice(NAMES)
    label = rng.choice(("tier", "src", "le", "x"))
    if rng.random() < 0.3:
        return text + "".join(f"m{at}_total 1\n" for at in range(num))
    return text + "".join(f'{name}{{{label}="{at}"}} 1\n' for at in range(num))


def _noise(text: str, rng: Random) -> str:
    """Overwrite some characters."""
    whole = list(text)
    for _ in range(rng.randrange(1, 30) if whole else 0):
        whole[rng.randrange(len(whole))] = rng.choice('{}",=\\# \n\r\x0b\x1c\u2028\0' + "a1")
    return "".join(whole)


CHANGES = _value, _label, _line, _cut, _many, _noise
WEIGHTS = 4, 4, 4, 1, 2, 1
