"""Rows of the dashboard."""

from __future__ import annotations

from kvtier.tools.dashboard.rows.loads import LOADS
from kvtier.tools.dashboard.rows.node import NODE
from kvtier.tools.dashboard.rows.requests import REQUESTS
from kvtier.tools.dashboard.rows.room import ROOM
from kvtier.tools.dashboard.rows.storage import STORAGE
from kvtier.tools.dashboard.rows.worth import WORTH

ROWS = (WORTH, ROOM, LOADS, STORAGE, REQUESTS, NODE)

__all__ = ["ROWS"]
