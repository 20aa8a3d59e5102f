"""NUMA nodes of devices and memory."""

from __future__ import annotations

from pathlib import Path


def pci_numa_node(bus_id: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of the PCI device at ``bus_id`` ("0000:3B:00.0"); None if unknown.

    root: where ``sys`` is mounted.
    """
    try:
        text = (root / "sys/bus/pci/devices" / bus_id.lower() / "numa_node").read_text()
        node = int(text)
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
