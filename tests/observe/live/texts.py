"""Metrics texts: recorded from real engines, and small ones written for one rule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvtier.observe.live.history import History
from kvtier.observe.live.picture import Picture
from kvtier.observe.live.reading import Reading

RECORDED = Path(__file__).parent / "recorded"
"""Metrics of real servers with kvtier, each before and after some requests; see its README."""


def recorded(engine: str, turn: int, at_s: float) -> Reading:
    return Reading.parse((RECORDED / f"{engine}-{turn}.txt").read_text(), at_s)


def reading(at_s: float, values: Mapping[str, float]) -> Reading:
    """Return a reading of these values. A key is the metric name with its labels."""
    return Reading.parse("".join(f"{at} {value}\n" for at, value in values.items()), at_s)


def picture(*values: Mapping[str, float], every_s: float = 10.0) -> Picture:
    """Return the picture after readings of ``values``, ``every_s`` seconds apart."""
    history = History()
    for at, value in enumerate(values):
        history.add(reading(at * every_s, value))
    return history.picture()


KVTIER = 'kvtier_server_requests_total{endpoint="chat",status="200"}'
"""A metric by which a text is recognized as one of kvtier's own server."""
