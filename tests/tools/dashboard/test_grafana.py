"""The dashboard loaded by classes that Grafana generates from its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="not installed: make test-dashboard")

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from .shown import DASHBOARD


def lost(given: object, read: object, path: str = "") -> Iterator[str]:
    """Return what ``read`` lacks of the given object. Additional fields are allowed."""
    if isinstance(given, dict) and isinstance(read, dict):
        for name, value in given.items():
            if name in read:
                yield from lost(value, read[name], f"{path}/{name}")
            else:
                yield f"{path}/{name}"
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for at, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from lost(one, other, f"{path}/{at}")
    elif given != read:
        yield path


def test_grafanas_schema_knows_all_that_is_written() -> None:
    register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(dict(DASHBOARD))))
    assert list(lost(dict(DASHBOARD), read)) == []


def test_what_the_schema_does_not_know_is_noticed() -> None:
    register_default_plugins()
    made = {**DASHBOARD, "no-such-thing": 1}
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(made)))
    assert list(lost(made, read)) == ["/no-such-thing"]
