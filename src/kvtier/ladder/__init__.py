"""The tiers together: residency, transfers and eviction are decided here for every engine."""

from __future__ import annotations

from kvtier.ladder.account import Account
from kvtier.ladder.ladder import Ladder
from kvtier.ladder.options import LadderOptions
from kvtier.ladder.prefetch import Prefetch
from kvtier.ladder.recall import Asked

__all__ = ["Account", "Asked", "Ladder", "LadderOptions", "Prefetch"]
