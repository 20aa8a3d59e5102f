"""Prefill on a grid of chunks: what the cache has is restored, the rest is computed and kept."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvtier.cache.audit import ELSEWHERE, AuditedPiece, Auditor, AuditOutcome, ComputedBlocks
from kvtier.cache.lease import Lease
from kvtier.cache.shared import Prompt, open_cache
from kvtier.cache.tokens import Cache
from kvtier.connectors.transformers.cache_layers import CACHE_FIELD, CacheLayers, cache_argument
from kvtier.connectors.transformers.images import Images
from kvtier.connectors.transformers.prompts import PromptBatch
from kvtier.core.config import CacheConfig
from kvtier.core.errors import CacheError, ConfigError
from kvtier.core.keys import token_labels
from kvtier.core.system.memory import available_bytes
from kvtier.core.types import DEVICE, HOST
from kvtier.tiers.memory import pages

logger = logging.getLogger(__name__)

RESERVE_BYTES = 1 << 30
"""Memory that stays free beside the blocks."""


class BlockMemory:
    """Blocks in host memory, and the cache over them and over the storage below.

    The blocks are the cache's first tier. A second copy between them and the model would only cost
    memory: ``generate`` has the KV of its own prompts anyway.

    Args:
        layers: the cache layers that they hold.
        capacity_bytes: bytes of all blocks.
        settings: settings of the storage below.

    Attributes:
        has_storage: whether another process may have stored what is found.
        is_shared: whether another process may store while this one runs.

    Raises:
        ConfigError: that is not possible.
    """

    def __init__(self, layers: CacheLayers, capacity_bytes: int, settings: CacheConfig) -> None:
        group = layers.group
        bytes_per_block = group.bytes_per_block
        self.num_blocks = capacity_bytes // bytes_per_block
        if self.num_blocks < 2 + 2 * layers.blocks_per_snapshot:
            raise ConfigError(
                f"host_capacity: {capacity_bytes / 2**20:.1f} MiB is room for {self.num_blocks} "
                f"blocks of {bytes_per_block} bytes, and "
                f"{2 + 2 * layers.blocks_per_snapshot} are needed; raise it or lower chunk_tokens"
            )
        left, limited_by = available_bytes()
        if capacity_bytes + RESERVE_BYTES > left:
            raise ConfigError(
                f"host_capacity: {capacity_bytes / 2**30:.2f} GiB does not fit: "
                f"{left / 2**30:.2f} GiB are left ({limited_by}) and "
                f"{RESERVE_BYTES / 2**30:.0f} GiB stay reserved; lower it"
            )
        self._map = pages.anonymous(self.num_blocks * bytes_per_block)
        held = np.frombuffer(self._map, np.uint8)
        self.blocks = torch.from_numpy(held).view(self.num_blocks, bytes_per_block)
        self.is_shared = bool(settings.locations)
        self.has_storage = self.is_shared or bool(settings.disk_path)
        self.cache = open_cache(
            held,
            "",  # the weights may change: each prompt has a namespace of its own
            settings,
            group=group,
            layout="block_first",
            blocks_per_snapshot=layers.blocks_per_snapshot,
        )


@dataclass(slots=True)
class TokenSources:
    """Tokens of prompts by their source.

    Attributes:
        tiers: tokens by the tier that they were restored from.
        num_without_room: prompts that were computed without the cache: it had no room for them.
        audits: audited prompts by outcome.
    """

    tiers: Counter[str] = field(default_factory=Counter)
    num_without_room: int = 0
    audits: Counter[str] = field(default_factory=Counter)

    def add(self, other: TokenSources) -> None:
        """Add the counts of another."""
        self.tiers += other.tiers
        self.num_without_room += other.num_without_room
        self.audits += other.audits


Forward = Callable[..., CausalLMOutputWithPast]


class ChunkGrid:
    """Computes prompts in chunks that end at multiples of ``chunk_tokens``.

    The KV of a whole chunk depends only on the tokens up to its end: prompts are computed one at a
    time, without padding, and always in the same chunks. So restored KV has the same bits.

    Args:
        forward: the model's own forward.
        takes_positions: whether it has an argument ``position_ids``.
        layers: its cache layers.
        memory: blocks of its chunks, and of snapshots of its state.
        auditor: chooses restored prompts to audit.
    """

    def __init__(
        self,
        forward: Forward,
        takes_positions: bool,
        layers: CacheLayers,
        memory: BlockMemory,
        auditor: Auditor,
    ) -> None:
        self._auditor = auditor
        self._forward = forward
        self._takes_positions = takes_positions
        self._cache_name = cache_argument(forward)
        self._layers = layers
        self._memory = memory
        dtype = str(layers.pieces[0].dtype).removeprefix("torch.")
        rounding = ELSEWHERE.get(dtype, 0.0)
        self._here = rounding if memory.is_shared else 0.0
        self._elsewhere = rounding if memory.has_storage else 0.0
        self._written = ComputedBlocks()

    def prefill(
        self, prompts: PromptBatch, namespace: bytes | None, reuse: TokenSources
    ) -> CausalLMOutputWithPast:
        """Compute prompts into ``prompts.cache``. Equal prompts are computed once.

        namespace: None to compute without the cache.
        Returns the output of ``forward``, with the requested logits.
        """

        def compute(tokens: list[int], cache: DynamicCache) -> CausalLMOutputWithPast:
            lease, images = None, prompts.images
            if namespace is not None:
                named = tokens if images is None else images.labelled(tokens, size)
                lease = self._fetch(named, len(tokens), namespace, reuse)
            options = prompts.num_logits, prompts.device, images
            return self._compute(tokens, cache, lease, reuse, *options)

        size = self._layers.block_tokens

        if len(prompts.rows) == 1 and len(prompts.rows[0]) == prompts.num_tokens:
            return compute(prompts.rows[0], prompts.cache)
        found: dict[tuple[int, ...], tuple[DynamicCache, torch.Tensor]] = {}
        for row in prompts.rows:
            if tuple(row) not in found:
                cache = self._layers.new_cache()
                output = compute(row, cache)
                assert output.logits is not None
                found[tuple(row)] = cache, output.logits
        rows = [found[tuple(row)] for row in prompts.rows]
        self._layers.join(prompts.cache, [cache for cache, _ in rows], prompts.num_tokens)
        setattr(output, CACHE_FIELD, prompts.cache)
        output.logits = torch.cat([logits for _, logits in rows])
        return output

    def keep(self, tokens: list[int], namespace: bytes, device: torch.device) -> int:
        """Compute whole chunks, and keep the unknown ones. Return how many tokens these have."""
        sources = TokenSources()
        lease = self._fetch(tokens, len(tokens) + 1, namespace, sources)  # all may be known
        if lease is None:
            return 0
        num_new = len(lease.labels) - lease.num_shared
        if num_new:
            self._compute(tokens, self._layers.new_cache(), lease, sources, 1, device)
        else:
            self._finish(lease, 0)
        return num_new * self._layers.block_tokens

    def _compute(
        self,
        tokens: list[int],
        cache: DynamicCache,
        lease: Lease | None,
        reuse: TokenSources,
        num_logits: int,
        device: torch.device,
        images: Images | None = None,
    ) -> CausalLMOutputWithPast:
        size = self._layers.block_tokens
        num_reused = 0
        if lease is not None:
            num_reused = min(lease.num_shared, (len(tokens) - num_logits) // size)
            if self._layers.states and num_reused < lease.num_shared:
                num_reused = 0  # the state is that of the whole prefix
        num_done = 0
        try:
            if lease is not None and num_reused and self._auditor.chooses():
                try:
                    outcome = self._audit(tokens, lease, num_reused, device, images)
                    reuse.audits[outcome] += 1
                    if outcome is AuditOutcome.DIFFERENT:
                        num_reused = 0
                except Exception as error:  # any type: models raise their own
                    logger.warning("a prompt is not audited: %s", error)
            if lease is not None and num_reused:
                blocks = self._memory.blocks
                self._layers.restore(cache, blocks, lease.slots[:num_reused])
                self._layers.restore_states(cache, blocks, lease.start_slots)
                _count(reuse, lease, num_reused, size)
            ids = torch.tensor([tokens], device=device)
            output = self._run(ids, num_reused * size, cache, lease, num_logits, images)
            num_done = 0 if lease is None else len(lease.labels)
        finally:
            if lease is not None:
                self._finish(lease, num_done)
        return output

    def _audit(
        self,
        tokens: list[int],
        lease: Lease,
        num_reused: int,
        device: torch.device,
        images: Images | None,
    ) -> AuditOutcome:
        """Compute one of the lease's first ``num_reused`` chunks again, and compare it.

        Of models with recurrent layers the first one: it needs no state.
        """
        size, blocks = self._layers.block_tokens, self._memory.blocks
        at = 0 if self._layers.states else self._auditor.piece(num_reused)
        cache, end = self._layers.new_cache(), (at + 1) * size
        assert lease.decision is not None, "it found something"
        tier = lease.decision.match.tiers[at]
        tier = HOST if tier == DEVICE else tier
        with torch.no_grad():
            if at:
                self._layers.restore(cache, blocks, lease.slots[:at])
            ids = torch.tensor([tokens[:end]], device=device)
            self._run(ids, at * size, cache, None, 1, images)
            made = torch.zeros_like(blocks[:1])
            self._layers.save(cache, end, made, [0])
            distances = self._layers.distances(blocks[lease.slots[at]][None], made)
        namespace, block = lease.namespace, lease.blocks[at]

        def judge(_: Cache) -> AuditOutcome:
            age_s = self._written.age_s(block)
            tolerance = self._elsewhere if age_s is None else self._here
            piece = AuditedPiece(tier, namespace, at * size, tolerance, age_s)
            return self._auditor.judge(distances, piece)

        return self._memory.cache.call(judge)

    def _fetch(
        self, tokens: list[int], num_tokens: int, namespace: bytes, reuse: TokenSources
    ) -> Lease | None:
        """Return a lease of the prompt's blocks, of its first ones if they don't all fit.

        tokens: ids, or digests of images in their place.
        num_tokens: length of the prompt; at least its last token is computed.
        """
        size = self._layers.block_tokens
        num_snapshot = 2 * self._layers.blocks_per_snapshot  # one to begin from, and a new one
        labels = token_labels(tokens, size)[: self._memory.num_blocks - 1 - num_snapshot]
        if not labels:
            return None
        prompt = Prompt(namespace, labels, min(num_tokens, (len(labels) + 1) * size))
        lease = None
        try:
            lease = self._memory.cache.fetch(prompt)
        except CacheError as error:
            logger.warning("a prompt is computed without the cache: %s", error)
        reuse.num_without_room += lease is None
        return lease

    def _finish(self, lease: Lease, num_blocks: int) -> None:
        def finish(cache: Cache) -> None:
            # Storage may have some of them already, as another process computed them.
            labels = lease.labels[:num_blocks]
            known = cache.match(lease.namespace, labels).num_blocks
            self._memory.cache.finish(lease, num_blocks)
            self._written.note(cache.match(lease.namespace, labels).blocks[known:])

        try:
            if self._auditor.share and not self._layers.states:
                self._memory.cache.call(finish)
            else:  # blocks before an unknown state are known, and not matched
                self._memory.cache.finish(lease, num_blocks)
        except CacheError as error:
            logger.warning("the KV of a prompt is not kept: %s", error)

    def _run(
        self,
        ids: torch.Tensor,
        first: int,
        cache: DynamicCache,
        lease: Lease | None,
        num_logits: int,
        images: Images | None,
    ) -> CausalLMOutputWithPast:
        """Compute the tokens from ``first`` on, and copy whole chunks to the lease's new blocks."""
        size, num_tokens = self._layers.block_tokens, ids.shape[1]
        logits = []
        for start in range(first, num_tokens, size):
            end = min(start + size, num_tokens)
            num_wanted = end - max(start, num_tokens - num_logits)
            began = time.perf_counter()
            options: dict[str, object] = {self._cache_name: cache}
            if self._takes_positions:
                options["position_ids"] = torch.arange(start, end, device=ids.device)[None]
            if images is not None:
                options |= images.arguments(start, end)
            output = self._forward(
                input_ids=ids[:, start:end],
                use_cache=True,
                logits_to_keep=max(1, num_wanted),
                return_dict=True,
                **options,
            )
            if num_wanted > 0:
                assert output.logits is not None
                logits.append(output.logits)
            block = start // size
            if lease is not None and lease.num_shared <= block < len(lease.labels):
                blocks = self._memory.blocks
                self._layers.save(cache, end, blocks, lease.slots[block : block + 1])
                self._layers.save_states(cache, blocks, lease.snapshot_slots(block + 1))
                with suppress(CacheError):  # closed meanwhile
                    self._memory.cache.observe_prefill(start, size, time.perf_counter() - began)
        output.logits = logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)
        return output


def _count(reuse: TokenSources, lease: Lease, num_blocks: int, size: int) -> None:
    """Count restored tokens. The first tier is host memory."""
    for tier, num in lease.record.hit_blocks.items():
        num = min(num, num_blocks)
        num_blocks -= num
        reuse.tiers[HOST if tier == DEVICE else tier] += num * size
