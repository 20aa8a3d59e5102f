"""Runs models with sliding windows: a sequence keeps the window KV of its last tokens only.

A pool of such a model has blocks of a few layers. A sequence has blocks of all its tokens for the
layers that attend to all of them, and a ring of blocks for the layers with a window. These are
divided into bundles of as many layers as a block has:

    blocks of all tokens    layers 5, 11, 17, 23    token 0 ........................ end
    ring, bundle 0          layers 0, 1, 2, 3                         the last ones, end
    ring, bundle 1          layers 4, 6, 7, 8                         the last ones, end
    ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import numpy as np
import torch
from transformers import PreTrainedModel

from kvtier.cache.audit import Distances
from kvtier.cache.lease import Lease
from kvtier.cache.states import WindowCache, WindowShape
from kvtier.cache.tokens import Cache
from kvtier.cache.transfer import LayerGate
from kvtier.core.config import CacheConfig
from kvtier.core.types import Slot
from kvtier.devices import Device
from kvtier.observe.block_events import BlockLog
from kvtier.serve.engine.paged import Span, ring_table
from kvtier.serve.engine.pool import KVPool, Place
from kvtier.serve.engine.runner import Keep, ModelRunner

MAX_BUNDLES = 7
"""Most bundles of a ring. A model in which fewer layers attend to all tokens keeps all tokens of
some layers with a window, too, since each bundle has blocks of its own in index and tiers."""


@dataclass(frozen=True, slots=True)
class WindowLayers:
    """Places of a model's layers in blocks of few layers.

    Attributes:
        places: of each layer.
        num_layers: layers of a block.
        num_bundles: blocks that hold the window KV of as many tokens as one block has.
        window: the largest one among the layers of the ring.
    """

    places: tuple[Place, ...]
    num_layers: int
    num_bundles: int
    window: int

    @staticmethod
    def of(windows: Sequence[int]) -> WindowLayers | None:
        """Return the places of layers with these windows, 0 for all tokens; None without any."""
        least = -(-len(windows) // (1 + MAX_BUNDLES))
        whole = [layer for layer, window in enumerate(windows) if not window]
        limited = [layer for layer, window in enumerate(windows) if window]
        num_more = max(0, least - len(whole))
        whole, limited = sorted(whole + limited[:num_more]), limited[num_more:]
        if not limited:
            return None
        num = len(whole)
        found = {layer: Place(at) for at, layer in enumerate(whole)}
        found |= {layer: Place(at % num, at // num) for at, layer in enumerate(limited)}
        return WindowLayers(
            tuple(found[layer] for layer in range(len(windows))),
            num,
            -(-len(limited) // num),
            max(windows[layer] for layer in limited),
        )

    def shape(self, block_size: int, chunk_tokens: int) -> WindowShape:
        """Return the sizes of the window KV."""
        return WindowShape(self.window, self.num_bundles, block_size, chunk_tokens // block_size)


class WindowRunner(ModelRunner):
    """Forwards over a pool of blocks of few layers, with a ring for each sequence.

    Args:
        model: the model.
        pool: its places are those of ``layers``.
        layers: where the layers are.
        chunk_tokens: the prefill grid.
    """

    commit_chunks = 1  # so that cells are in the cache before the next one is written

    def __init__(
        self, model: PreTrainedModel, pool: KVPool, layers: WindowLayers, chunk_tokens: int
    ) -> None:
        super().__init__(model, pool, chunk_tokens)
        self._layers = layers
        self._shape = layers.shape(pool.group.block_size, chunk_tokens)
        self._num_chunk = self.num_scratch
        self.num_scratch += self._shape.ring_blocks(self._num_chunk + self._shape.num_needed)
        self.has_first_layer = layers.places[0].bundle is None

    @property
    def fingerprint(self) -> str:
        content = f"{super().fingerprint} {self._layers}"
        return blake2b(content.encode(), digest_size=8).hexdigest()

    def open_cache(self, config: CacheConfig, device: Device, events: BlockLog | None) -> Cache:
        tier = self._pool.tier()
        return WindowCache(config, device, tier, events=events, names_codec=True, shape=self._shape)

    def span(self, lease: Lease, start: int, end: int) -> Span:
        return Span(lease.slots, start, end, lease.ring, lease)

    @torch.inference_mode()
    def prefill_tail(
        self, token_ids: Sequence[int], span: Span, keep: Keep, gate: LayerGate | None = None
    ) -> torch.Tensor:
        lease, num_blocks = span.lease, span.end // self.block_size
        if lease is not None and lease.start_slots:
            self._restore(span, lease.start_slots)
            lease.has_begun()
        logits = super().prefill_tail(token_ids, span, keep, gate)
        is_whole = span.end % self._chunk_tokens == 0
        if lease is not None and is_whole and num_blocks <= len(lease.labels):
            self._save(span, lease.snapshot_slots(num_blocks))
        return logits

    @torch.inference_mode()
    def recompute(
        self,
        token_ids: Sequence[int],
        lease: Lease,
        start: int,
        scratch: Sequence[Slot],
        states: Callable[[int], Sequence[Slot] | None],
    ) -> Distances:
        """Do the same as ``Runner.recompute``.

        Of layers with a window the last tokens are compared, if their cell is on the device; others
        have a distance of 0.
        """
        first = start // self.block_size
        end = first + self._num_chunk
        made, ring = scratch[: self._num_chunk], scratch[self._num_chunk :]
        span = Span([*lease.slots[:first], *made], start, start + len(token_ids), ring)
        cells, last = states(first), states(end)
        if cells:
            self._restore(span, cells)
        super().prefill_tail(token_ids, span, keep=1)
        path = self.distances(lease.slots[first:end], made)
        of_rings = np.zeros((self._layers.num_bundles, *path.shape), np.float32)
        if last:
            cell = last[-self._shape.blocks_per_cell :]
            found = self.distances(cell, self._ring_slots(ring, end))
            by_bundle = found.reshape(*path.shape[:2], self._layers.num_bundles, -1)
            of_rings[..., -by_bundle.shape[3] :] = np.moveaxis(by_bundle, 2, 0)
        return np.stack(
            [
                (path if place.bundle is None else of_rings[place.bundle])[place.layer]
                for place in self._layers.places
            ]
        )

    def _restore(self, span: Span, cells: Sequence[Slot]) -> None:
        """Copy the cells before ``span`` into its ring. cells: their slots, cell after cell."""
        shape, cut = self._shape, span.start // self.block_size
        num_cells = len(cells) // shape.blocks_per_cell
        ends = shape.ends_in_reach(cut)[:num_cells][::-1]
        rings = [slot for at in ends for slot in self._ring_slots(span.ring, at)]
        self._pool.copy_blocks(cells, rings)

    def _save(self, span: Span, cell: Sequence[Slot]) -> None:
        """Copy the last blocks of ``span`` from its ring into a cell, if it has slots."""
        if cell:
            self._pool.copy_blocks(self._ring_slots(span.ring, span.end // self.block_size), cell)

    def _ring_slots(self, ring: Sequence[Slot], end: int) -> list[Slot]:
        """Return the slots of the cell before ``end`` blocks in a ring, bundle after bundle."""
        table = ring_table(ring, self._pool)
        blocks = np.arange(end - self._shape.blocks_of_prompt, end) % table.shape[1]
        return [Slot(slot) for slot in table[:, blocks].ravel().tolist()]

    # -- at load -----------------------------------------------------------------------------------

    def _first_blocks(self, num_tokens: int) -> Callable[[int, int], Span]:
        num_blocks = -(-num_tokens // self.block_size)
        num_ring = self._shape.ring_blocks(num_blocks)
        slots = [Slot(slot) for slot in range(num_blocks + num_ring)]
        return partial(Span, slots[:num_blocks], ring=slots[num_blocks:])
