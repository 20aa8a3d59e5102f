"""The dashboard, row by row."""

from __future__ import annotations

from kvtier.dashboard.rows.loads import LOADS
from kvtier.dashboard.rows.requests import REQUESTS
from kvtier.dashboard.rows.room import ROOM
from kvtier.dashboard.rows.storage import STORAGE
from kvtier.dashboard.rows.worth import WORTH

ROWS = (WORTH, ROOM, LOADS, STORAGE, REQUESTS)

__all__ = ["ROWS"]
