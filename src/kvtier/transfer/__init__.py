"""Carry out plans: stage copies as arrays, run them on worker threads, report their outcome."""

from __future__ import annotations

from kvtier.transfer.behind import Blocks, behind
from kvtier.transfer.copy_job import CopyJob
from kvtier.transfer.engine import TransferEngine
from kvtier.transfer.job import Job
from kvtier.transfer.lane import Lane
from kvtier.transfer.layer_gate import LayerGate
from kvtier.transfer.local import LocalMover
from kvtier.transfer.mover import FindJob, Move, Mover, Scrubbed
from kvtier.transfer.staging import Steps, stage, stage_steps
from kvtier.transfer.transfer import Transfer, Waiter

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
