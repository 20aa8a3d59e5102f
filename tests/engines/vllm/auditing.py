"""kvtier's fronts with faults that no checksum shows: what is stored is not what its keys name.

A fault is named by the environment variable ``FAULT``, which vLLM's processes inherit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from kvtier.connectors.common.recomputed import block_bytes
from kvtier.connectors.vllm.kv_connector.connector import KvtierConnector
from kvtier.connectors.vllm.offloading.spec import KvtierSpec
from kvtier.connectors.vllm.shared.adapters import AdapterLoad
from kvtier.connectors.vllm.shared.names import VllmNames
from kvtier.connectors.vllm.shared.worker import TierWorker
from kvtier.devices import Direction

FAULT = "KVTIER_TEST_FAULT"


def swap(ranks: range) -> None:
    """Store blocks that are stored together in each other's place, in some ranks."""
    submit = TierWorker.submit

    def swapped(self: TierWorker, job_id: int, pages: Any, slots: Any, way: Direction) -> None:
        if way is Direction.STORE and not slots.audits and self._rank in ranks:
            slots = replace(slots, slots=slots.slots[::-1])
        submit(self, job_id, pages, slots, way)

    TierWorker.submit = swapped  # type: ignore[method-assign,assignment]


def lose_last_token() -> None:
    """Store zeros as the KV of each block's last token."""
    submit = TierWorker.submit

    def without_last(self: TierWorker, job_id: int, pages: Any, slots: Any, way: Direction) -> None:
        submit(self, job_id, pages, slots, way)
        if way is Direction.LOAD or slots.audits:
            return
        self.wait({job_id})
        comparer: Any = self._comparer
        host: Any = self._host
        size = self._pool.slot_bytes
        for slot in slots.slots:
            numbers = block_bytes(host.memory, slot * size, size)
            for (part,) in comparer._groups[0]:
                width = part.dtype.itemsize
                numbers.view(f"u{width}")[part.first + part.places[:, -1]] = 0

    TierWorker.submit = without_last  # type: ignore[method-assign,assignment]


def store_early() -> None:
    """Store pages before the model has computed them."""
    bind = KvtierConnector.bind_connector_metadata

    def early(self: KvtierConnector, metadata: Any) -> None:
        message = metadata.message
        jobs = [job for job in message.stores if not job.slots.audits]
        for job in jobs:
            self._pages._submit(job, Direction.STORE)
            self._pages.worker.wait({job.job_id})
        later = [job for job in message.stores if job.slots.audits]
        bind(self, replace(metadata, message=replace(message, stores=later)) if jobs else metadata)

    KvtierConnector.bind_connector_metadata = early


def confuse_adapters() -> None:
    """Take every adapter for the same one."""
    read = AdapterLoad.read

    def same(self: AdapterLoad, traits: str) -> None:
        read(self, traits)
        self.content = bytes(32)

    AdapterLoad.read = same  # type: ignore[method-assign]


def ignore_names() -> None:
    """Give all engines' blocks the same names."""
    VllmNames.digest = property(  # type: ignore[assignment,method-assign]
        lambda self: b"" if self.needs_layout else bytes(range(32))
    )


def patch_attention() -> None:
    """Compute attention with another scale."""
    ignore_names()
    forward = CPUAttentionBackendImpl.forward

    def scaled(self: Any, layer: Any, query: torch.Tensor, *more: Any, **named: Any) -> Any:
        return forward(self, layer, 8 * query, *more, **named)

    CPUAttentionBackendImpl.forward = scaled


FAULTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "swapped": lambda: swap(range(8)),
    "shard": lambda: swap(range(1, 2)),
    "last token": lose_last_token,
    "early": store_early,
    "adapter": confuse_adapters,
    "names": ignore_names,
    "attention": patch_attention,
}
FAULTS[os.environ.get(FAULT, "")]()


class FaultConnector(KvtierConnector):
    """``"kv_connector": "FaultConnector"`` with the module path of this file."""


# MultiConnector looks up by this name the class that reads the statistics.
FaultConnector.__name__ = KvtierConnector.__name__


class FaultSpec(KvtierSpec):
    """``"spec_name": "FaultSpec"`` with the module path of this file."""
