"""Carry out plans: stage copies as arrays, run them on worker threads, report their outcome."""

from __future__ import annotations

from kvtier.cache.transfer.copy_job import CopyJob, LayerGate
from kvtier.cache.transfer.engine import TransferEngine
from kvtier.cache.transfer.job import Job
from kvtier.cache.transfer.lane import Lane
from kvtier.cache.transfer.local import Blocks, LocalMover, behind
from kvtier.cache.transfer.mover import FindJob, Move, Mover, Scrubbed
from kvtier.cache.transfer.staging import Steps, stage, stage_steps
from kvtier.cache.transfer.transfer import Transfer, Waiter

__all__ = [
    "Blocks",
    "CopyJob",
    "FindJob",
    "Job",
    "Lane",
    "LayerGate",
    "LocalMover",
    "Move",
    "Mover",
    "Scrubbed",
    "Steps",
    "Transfer",
    "TransferEngine",
    "Waiter",
    "behind",
    "stage",
    "stage_steps",
]
