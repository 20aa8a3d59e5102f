"""Folder of this user's programs for data that can be recomputed."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/kvtier``, or ``~/.cache/kvtier``; perhaps not there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"
