"""Moves that the ranks of an engine carry out: one process orders them, all ranks report.

deciding process                               each rank
RankMover  ---- orders, with the engine's ---> RankExecutor
           <--- own messages; reports --------
"""

from __future__ import annotations

from kvtier.cache.transfer.ranks.executor import RankExecutor
from kvtier.cache.transfer.ranks.messages import (
    Compared,
    Done,
    Hello,
    RankOrder,
    RecoveredBlocks,
    RecoveredKeys,
    Report,
    Verb,
    joined,
)
from kvtier.cache.transfer.ranks.mover import RankMover

__all__ = [
    "Compared",
    "Done",
    "Hello",
    "RankExecutor",
    "RankMover",
    "RankOrder",
    "RecoveredBlocks",
    "RecoveredKeys",
    "Report",
    "Verb",
    "joined",
]
