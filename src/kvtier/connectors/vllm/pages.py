"""An engine's tensors as shares of pages, by KV group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.connectors.common.paged_pool import PagedPool, PoolShare
from kvtier.devices import Memory


@dataclass(frozen=True, slots=True)
class EnginePages:
    """Pages of an engine on one device.

    groups: the shares of each KV group. tensors: own the memory of all shares.
    """

    groups: Sequence[Sequence[PoolShare]]
    num_pages: int
    tensors: Sequence[torch.Tensor]

    @property
    def device(self) -> str:
        """Name of the device."""
        device = self.tensors[0].device
        return device.type if device.index is None else f"{device.type}:{device.index}"

    def pool(self, pages_per_block: int, slot_bytes: int) -> PagedPool:
        """Return the pages with the slots that their blocks are copied to."""
        kind = self.tensors[0].device.type
        storages = [tensor.untyped_storage() for tensor in self.tensors]
        # One for each layer, or one for several: a layer is a part of it then.
        allocations = {
            each.data_ptr(): Memory(each.data_ptr(), each.nbytes(), kind, each) for each in storages
        }
        return PagedPool(
            self.groups,
            self.num_pages,
            pages_per_block,
            slot_bytes,
            kind,
            self.tensors,
            list(allocations.values()),
        )
