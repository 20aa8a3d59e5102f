"""Parsed queries of the shipped dashboard and alerts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

import kvtier
from kvtier.observe.specs import DECLARED, MetricSpec

FOLDER = Path(kvtier.__file__).parent / "tools/dashboard"
RULES = FOLDER / "kvtier-rules.yml"
DASHBOARD: Mapping[str, Any] = json.loads((FOLDER / "kvtier.json").read_text())
(_GROUP,) = yaml.safe_load(RULES.read_text())["groups"]

_NAME = re.compile(r"\b(?:kvtier_|vllm:|sglang:)\w+")
_PART = re.compile(r"_(bucket|sum|count)$")


def metrics_in(text: str) -> tuple[MetricSpec, ...]:
    """Return the metrics that a query or a page names; fail on one that is not declared."""
    names = [name if name in DECLARED else _PART.sub("", name) for name in _NAME.findall(text)]
    return tuple(DECLARED[name] for name in dict.fromkeys(names))


@dataclass(frozen=True)
class Query:
    """A query of a panel. legend: the legend of its lines, with labels as ``{{tier}}``."""

    text: str
    legend: str


@dataclass(frozen=True)
class Panel:
    title: str
    description: str
    queries: tuple[Query, ...]

    @property
    def metrics(self) -> Iterable[MetricSpec]:
        return dict.fromkeys(spec for query in self.queries for spec in metrics_in(query.text))


@dataclass(frozen=True)
class Alert:
    name: str
    condition: str
    severity: str
    summary: str
    advice: str


PANELS = [
    Panel(
        each["title"],
        each["description"],
        tuple(Query(target["expr"], target["legendFormat"]) for target in each["targets"]),
    )
    for each in DASHBOARD["panels"]
    if each["type"] != "row"
]
ALERTS = [
    Alert(
        each["alert"],
        each["expr"],
        each["labels"]["severity"],
        each["annotations"]["summary"],
        each["annotations"]["description"],
    )
    for each in _GROUP["rules"]
]
