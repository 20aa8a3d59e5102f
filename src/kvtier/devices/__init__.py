"""Devices: copies between accelerator memory and host memory."""

from __future__ import annotations

from kvtier.devices.base import CopyBatch, CopyQueue, Device, Direction, Fence, Finding, Memory
from kvtier.devices.find import find_device

__all__ = [
    "CopyBatch",
    "CopyQueue",
    "Device",
    "Direction",
    "Fence",
    "Finding",
    "Memory",
    "find_device",
]
