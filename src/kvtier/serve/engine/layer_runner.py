"""Runs models by transformers' own cache layers and attention, one sequence at a time.

It serves what has no attention function to replace: recurrent and hybrid models, and attention of
other forms. A running sequence has a cache of transformers beside the blocks of the pool. What the
cache has of a prompt is copied into it, and whole chunks are copied out of it.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel

from kvtier.cache.audit import Distances
from kvtier.cache.lease import Lease
from kvtier.cache.states import SnapshotCache
from kvtier.cache.tokens import Cache
from kvtier.cache.transfer import LayerGate
from kvtier.connectors.transformers.cache_layers import (
    CacheLayers,
    UnsupportedModelError,
    cache_argument,
)
from kvtier.core.config import CacheConfig
from kvtier.core.errors import ConfigError
from kvtier.core.types import Slot
from kvtier.devices import Device, Memory
from kvtier.layout import KVGroup, named_layout
from kvtier.observe.block_events import BlockLog
from kvtier.serve.engine.paged import Span
from kvtier.serve.engine.pool import zeros_from_a_page
from kvtier.serve.engine.profile import MeasuredModel, reason
from kvtier.serve.engine.runner import Keep, Runner, kept_logits, places_in
from kvtier.tiers import DeviceTier


class LayerProfile(MeasuredModel):
    """Cache layers of a model, as it was seen to fill them.

    Args:
        module: the model, which is left with the attention that it will have.
        name: its name, for messages.
        slow_because: why paged attention can't serve it.

    Raises:
        ConfigError: it has layers that cannot be restored.
    """

    runner_name = "layers"

    def __init__(self, module: PreTrainedModel, name: str, slow_because: str) -> None:
        self._module, self._name = module, name
        self.slow_because = slow_because
        # Plain attention takes longer. The self-check tells if this one computes something else.
        has_sdpa = getattr(module, "_supports_sdpa", False)
        module.set_attn_implementation("sdpa" if has_sdpa else "eager")
        layers = self.layers(1)
        self.windows = layers.windows
        self.num_layers = len({piece.layer for piece in layers.pieces})
        self.num_recurrent = len({state.layer for state in layers.states})
        self.bytes_per_token = sum(piece.num_bytes for piece in layers.pieces)
        self.bytes_per_snapshot = sum(state.num_bytes for state in layers.states)

    def layers(self, block_size: int) -> CacheLayers:
        """Return the layers, and their places in blocks of ``block_size`` tokens."""
        try:
            return CacheLayers(self._module, block_size)
        except UnsupportedModelError as error:
            raise ConfigError(
                f"model: {self._name!r} is not served, because {error}; the embedded engine can't "
                "restore a prefix of it"
            ) from error
        except Exception as error:  # any type: models differ in what they ask of a cache
            raise ConfigError(
                f"model: {self._name!r} is of type {self._module.config.model_type!r}, which can't "
                f"use transformers' DynamicCache ({reason(error)})"
            ) from error

    def group(self, block_size: int) -> KVGroup:
        return self.layers(block_size).group

    def blocks_per_snapshot(self, block_size: int) -> int:
        return self.layers(block_size).blocks_per_snapshot

    def features(self) -> str:
        found = ["full"] if self.num_layers else []
        if self.windows:
            found.append(f"windows of {', '.join(map(str, self.windows))} tokens")
        if self.num_recurrent:
            found.append(f"{self.num_recurrent} recurrent layer{'s' * (self.num_recurrent > 1)}")
        return ", ".join(found)

    def make_runner(
        self, module: PreTrainedModel, block_size: int, num_blocks: int, chunk_tokens: int
    ) -> LayerRunner:
        return LayerRunner(module, self.layers(block_size), num_blocks, chunk_tokens)


class LayerRunner(Runner):
    """Forwards over caches of transformers, which are filled from a pool of blocks.

    Args:
        model: the model.
        layers: its cache layers.
        num_blocks: blocks of the pool.
        chunk_tokens: the prefill grid.
    """

    def __init__(
        self, model: PreTrainedModel, layers: CacheLayers, num_blocks: int, chunk_tokens: int
    ) -> None:
        self._model = model
        self._layers = layers
        self._chunk_tokens = chunk_tokens
        self.num_scratch = chunk_tokens // layers.block_tokens
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._cache_name = cache_argument(model.forward)
        self._layout = named_layout("block_first", layers.group, num_blocks)
        flat = zeros_from_a_page(self._layout.nbytes, torch.uint8, model.device)
        self._memory = Memory(flat.data_ptr(), self._layout.nbytes, model.device.type, flat)
        self._blocks = flat.view(num_blocks, layers.group.bytes_per_block)
        self._caches: WeakKeyDictionary[Lease, DynamicCache] = WeakKeyDictionary()

    @property
    def block_size(self) -> int:
        return self._layers.block_tokens

    @property
    def fingerprint(self) -> str:
        attention = self._model.config._attn_implementation
        content = f"{self._layers.fingerprint} {attention}"
        return blake2b(content.encode(), digest_size=8).hexdigest()

    def open_cache(self, config: CacheConfig, device: Device, events: BlockLog | None) -> Cache:
        tier = DeviceTier(self._memory, self._layout)
        if not self._layers.states:
            return Cache(config, device, tier, events=events, names_codec=True)
        return SnapshotCache(
            config,
            device,
            tier,
            events=events,
            names_codec=True,
            blocks_per_snapshot=self._layers.blocks_per_snapshot,
            grain_blocks=self._chunk_tokens // self.block_size,
        )

    # -- requests ----------------------------------------------------------------------------------

    def span(self, lease: Lease, start: int, end: int) -> Span:
        return Span(lease.slots, start, end, lease=lease)

    @torch.inference_mode()
    def prefill_tail(
        self, token_ids: Sequence[int], span: Span, keep: Keep, gate: LayerGate | None = None
    ) -> torch.Tensor:
        assert span.lease is not None, "of this runner"
        if gate is not None:
            gate.wait()  # the whole prefix is copied before the forward
        lease, size = span.lease, self.block_size
        cache = self._caches.get(lease)
        if cache is None or cache.get_seq_length() != span.start:
            cache = self._restored(lease.slots[: span.start // size], lease.start_slots)
            self._caches[lease] = cache
        logits = self._forward(token_ids, span.start, cache, keep)
        num_blocks = span.end // size
        if span.end % self._chunk_tokens == 0 and num_blocks <= len(lease.labels):
            slots = lease.slots[span.start // size : num_blocks]
            self._layers.save(cache, span.end, self._blocks, slots)
            self._layers.save_states(cache, self._blocks, lease.snapshot_slots(num_blocks))
        return logits.cpu()

    @torch.inference_mode()
    def recompute(
        self,
        token_ids: Sequence[int],
        lease: Lease,
        start: int,
        scratch: Sequence[Slot],
        states: Callable[[int], Sequence[Slot] | None],
    ) -> Distances:
        first = start // self.block_size
        cache = self._restored(lease.slots[:first], states(first) or ())
        self._forward(token_ids, start, cache, 1)
        self._layers.save(cache, start + len(token_ids), self._blocks, scratch)
        return self.distances(lease.slots[first : first + len(scratch)], scratch)

    def distances(self, found: Sequence[Slot], recomputed: Sequence[Slot]) -> Distances:
        return self._layers.distances(self._blocks[[*found]], self._blocks[[*recomputed]])

    @torch.inference_mode()
    def decode(self, token_ids: Sequence[int], spans: Sequence[Span]) -> torch.Tensor:
        """Compute one more token for each sequence, one after the other."""
        rows = []
        for token_id, span in zip(token_ids, spans, strict=True):
            assert span.lease is not None, "of this runner"
            rows.append(self._forward([token_id], span.start, self._caches[span.lease], 1))
        return torch.cat(rows)

    def _restored(self, slots: Sequence[Slot], start_slots: Sequence[Slot]) -> DynamicCache:
        """Return a new cache with what the pool has of a prefix."""
        cache = self._layers.new_cache()
        if slots:
            self._layers.restore(cache, self._blocks, slots)
            self._layers.restore_states(cache, self._blocks, start_slots)
        return cache

    def _forward(
        self, token_ids: Sequence[int], start: int, cache: DynamicCache, keep: Keep
    ) -> torch.Tensor:
        """Return the logits of some tokens: float32 [num_kept, vocab_size]."""
        device = self._model.device
        options: dict[str, object] = {self._cache_name: cache}
        if self._takes_positions:
            positions = torch.arange(start, start + len(token_ids), device=device)
            options["position_ids"] = positions[None]
        ids = torch.tensor([token_ids], device=device)
        return kept_logits(self._model, keep, input_ids=ids, use_cache=True, **options).float()

    # -- at load -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def rehearse(
        self, prompt: Sequence[int], kept: Sequence[int], batches: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Do the same as ``Runner.rehearse``. Each chunk continues what blocks have, as a hit."""
        size, chunks, steps = self.block_size, list[torch.Tensor](), dict[int, torch.Tensor]()
        slots = [Slot(slot) for slot in range(-(-len(prompt) // size))]
        states = [Slot(len(slots) + at) for at in range(self._layers.blocks_per_snapshot)]
        lengths = sorted({length for batch in batches for length in batch})
        for start in range(0, len(prompt), self._chunk_tokens):
            end = min(start + self._chunk_tokens, len(prompt))
            before = slots[: start // size], states
            cache, at = self._restored(*before), start
            for length in (length for length in lengths if start < length <= end):
                if at < length - 1:
                    self._forward(prompt[at : length - 1], at, cache, 1)
                steps[length] = self._forward(prompt[length - 1 : length], length - 1, cache, 1)
                at = length
            cache = self._restored(*before)
            places = places_in(kept, start, end)
            chunks.append(self._forward(prompt[start:end], start, cache, places))
            if end < len(prompt):
                self._layers.save(cache, end, self._blocks, slots[start // size : end // size])
                self._layers.save_states(cache, self._blocks, states)
        return torch.cat([*chunks, *(steps[length] for batch in batches for length in batch)]).cpu()

    @torch.inference_mode()
    def _timed_prefill(self, first: int, num_tokens: int) -> float:
        states = [Slot(slot) for slot in range(self._layers.blocks_per_snapshot)]
        slots = [Slot(slot) for slot in range(first // self.block_size)]
        cache = self._restored(slots, states)
        began = time.perf_counter()
        self._forward([0] * num_tokens, first, cache, 1)
        return time.perf_counter() - began
