"""What is decided once, for every engine: what is where, what moves, what leaves."""

from __future__ import annotations

from kvtier.ladder.account import Account
from kvtier.ladder.ladder import Ladder
from kvtier.ladder.options import LadderOptions
from kvtier.ladder.prefetch import Prefetch
from kvtier.ladder.recall import Asked

__all__ = ["Account", "Asked", "Ladder", "LadderOptions", "Prefetch"]
