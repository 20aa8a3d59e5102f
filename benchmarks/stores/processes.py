"""Stores by name, each opened in a folder of its own, and measured in a process of its own."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from benchmarks.stores.clients import MIB, Measured, measure
from benchmarks.stores.directories import DirectoryPlace
from benchmarks.stores.registered_memory import MooncakePlace, NixlPlace
from benchmarks.stores.servers import AzurePlace, ClusterPlace, Place, S3Place, ValkeyPlace

SIZES = {"64 KiB": MIB // 16, "1 MiB": MIB, "2.5 MiB": 5 * MIB // 2}
STORES: dict[str, type[Place]] = {
    place.name: place
    for place in (
        ValkeyPlace,
        ClusterPlace,
        S3Place,
        AzurePlace,
        DirectoryPlace,
        MooncakePlace,
        NixlPlace,
    )
}


@contextmanager
def opened(kind: type[Place]) -> Iterator[Place]:
    """Open a store with a server of its own, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvtier-store-") as folder:
        place = kind(Path(folder))
        try:
            yield place
        finally:
            place.close()


def _measure(name: str, options: argparse.Namespace) -> dict[str, Measured]:
    with opened(STORES[name]) as place:
        return {block: measure(place, SIZES[block], options) for block in options.sizes}


def measure_apart(name: str, options: argparse.Namespace) -> dict[str, Measured]:
    """Measure each size of a block in a new process, with a server of that process's own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_measure, name, options).result()
