"""Comparison of recomputed blocks with stored ones, in the process that has mapped both.

A recomputed block is copied from the engine's pages to a scratch slot, as a store would copy it.
There it is compared with the bytes that a load would have copied, on a thread of its own: no step
of the engine waits for it.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from kvtier.cache.audit import (
    MIN_LEARNED,
    AuditedPiece,
    Auditor,
    AuditOutcome,
    Distances,
    stacked,
    token_distances,
)
from kvtier.cache.transfer import Job
from kvtier.cache.transfer.lane import Lane
from kvtier.cache.transfer.ranks import Compared
from kvtier.connectors.common.paged_pool import GroupPages, PagedPool
from kvtier.core.errors import DeviceError
from kvtier.core.types import Slot
from kvtier.devices import CopyBatch, Device, Direction, Memory
from kvtier.layout import opaque
from kvtier.tiers import HostTier

MAX_BLOCKS = 8
"""Blocks that are compared per hit, and slots for them."""

FLOATS = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""Types of numbers that are compared."""
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class TokenPlaces:
    """The numbers of one tensor of a layer in a block, token by token.

    dtype: of the numbers. first: position of the first one in the block, in numbers. places: int32
    [num_parts, num_tokens, num_numbers], positions behind that one, shared by layers of one shape.
    Parts are K and V where one tensor has both.
    """

    dtype: torch.dtype
    first: int
    places: npt.NDArray[np.int32]

    def distances(self, fresh: Bytes, stored: Bytes) -> list[list[float]]:
        """Return the distances of each part's tokens."""
        found, recomputed = map(self._parts, (stored, fresh))
        return [token_distances(*pair) for pair in zip(found, recomputed, strict=True)]

    def _parts(self, block: Bytes) -> torch.Tensor:
        numbers = block.view(f"u{self.dtype.itemsize}")[self.first :][self.places]
        return torch.from_numpy(numbers.view(np.uint8)).view(self.dtype)


Layers = Sequence[Sequence[TokenPlaces]]
"""The tensors of each layer of a KV group."""


class Recomputations:
    """The last computations of a few blocks, with which later ones are compared, too."""

    def __init__(self) -> None:
        self._fresh: OrderedDict[bytes, Bytes] = OrderedDict()

    def compare(self, key: bytes, fresh: Bytes, stored: Bytes, layers: Layers) -> Compared:
        """Compare a recomputed block with the stored one and with its last computation."""
        before = self._fresh.pop(key, fresh)
        apart = float(_distances(fresh, before, layers).max())
        self._fresh[key] = fresh.copy()
        if len(self._fresh) > MAX_BLOCKS:
            self._fresh.popitem(last=False)
        return Compared(_distances(fresh, stored, layers), apart)


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """A block to compare. scratch: slot of the new bytes. stored: memory, offset of the others."""

    key: bytes
    group: int
    scratch: Slot
    stored: tuple[Memory, int]


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Comparison of some blocks, once they have been copied to scratch slots.

    Attributes:
        keys: the blocks that are held for it.
        batches: copies of the recomputed blocks to scratch slots.
        results: by key, once ``job`` is done.
        job: the comparison, which never fails a copy.
    """

    keys: Sequence[bytes]
    batches: list[CopyBatch]
    pairs: list[_Pair]
    results: dict[bytes, Compared] = field(default_factory=dict)
    job: Job = field(default_factory=lambda: Job(0))


class Comparer:
    """Compares recomputed blocks with stored ones, in a rank. Used on the rank's thread.

    Args:
        pool: the engine's pages.
        device: has the pages.
        groups: layers of each KV group; None if their numbers are not known. Its blocks have no
            result.
    """

    def __init__(self, pool: PagedPool, device: Device, groups: Sequence[Layers | None]) -> None:
        self._pool = pool
        self._groups = groups
        self._scratch = HostTier(opaque(pool.slot_bytes), MAX_BLOCKS * pool.slot_bytes, device)
        self._recomputations = Recomputations()
        self._lane = Lane("audit", DeviceError)
        self._lane.start()

    def begin(
        self, blocks: Sequence[Sequence[GroupPages]], keys: Sequence[bytes], memory: Memory
    ) -> Comparison:
        """Prepare a comparison of as many blocks as there are scratch slots for.

        Args:
            blocks: per block its pages, by group, with its slot in ``memory``.
            keys: of the blocks.
            memory: has the stored blocks.
        """
        slots = self._scratch.allocate(min(len(blocks), self._scratch.num_free)) or ()
        host, batches, pairs = self._scratch, [], []
        for groups, key, scratch in zip(blocks, keys, slots, strict=False):
            (group,) = (at for at, each in enumerate(groups) if each.slots)
            (slot,) = groups[group].slots
            assert slot is not None, "a block that is read directly has no slot to compare with"
            pairs.append(_Pair(key, group, scratch, (memory, slot * self._pool.slot_bytes)))
            moved = [replace(each, slots=[scratch] * len(each.slots)) for each in groups]
            batches.append(self._pool.stage(moved, host.memory, Direction.STORE, host.seams))
        return Comparison(keys, batches, pairs)

    def compare(self, comparison: Comparison, copy: Job) -> None:
        """Compare once the blocks were copied to their scratch slots, by ``copy``."""
        self._lane.submit(partial(self._compare, comparison, copy), 0, job=comparison.job)

    def _compare(self, comparison: Comparison, copy: Job, _: Job) -> Sequence[int]:
        copy.wait()
        num_bytes = self._pool.slot_bytes
        for pair in comparison.pairs if copy.succeeded else ():
            layers = self._groups[pair.group]
            if layers is None:
                continue
            fresh = block_bytes(self._scratch.memory, pair.scratch * num_bytes, num_bytes)
            stored = block_bytes(*pair.stored, num_bytes)
            compared = self._recomputations.compare(pair.key, fresh, stored, layers)
            comparison.results[pair.key] = compared
        return ()

    def end(self, comparison: Comparison) -> dict[bytes, Compared]:
        """Free the scratch slots of a comparison that is done. Return its results by key."""
        self._scratch.free([pair.scratch for pair in comparison.pairs])
        return comparison.results

    def close(self, timeout_s: float) -> bool:
        """Return whether nothing is compared any more."""
        is_over = self._lane.close(timeout_s)
        if is_over:
            self._scratch.close()
        return is_over


class BlockJudge:
    """Judges comparisons of an engine whose hits are computed in other pieces than misses.

    Attributes:
        auditor: chooses hits, and judges differences.
        known: blocks of the last audit: there is an earlier computation of them, by these weights.
    """

    def __init__(self, auditor: Auditor, is_exact: bool = False) -> None:
        self.auditor = auditor
        self.known: Collection[bytes] = ()
        self._is_exact = is_exact
        self._num_pairs = 0

    @property
    def learns(self) -> bool:
        """Whether a prompt that was audited is to be audited again, to learn the tolerance."""
        return not self._is_exact and self._num_pairs < MIN_LEARNED and bool(self.known)

    def judge(
        self, keys: Sequence[bytes], compared: Mapping[bytes, Compared], piece: AuditedPiece
    ) -> AuditOutcome:
        """Return the outcome for neighbouring blocks. piece: without tolerance and block size."""
        if len(compared) < len(keys):
            self.auditor.skip(piece.tier)
            return AuditOutcome.SKIPPED
        pairs = [compared[key].apart for key in keys if key in self.known]
        self._num_pairs += bool(pairs)
        self.known = keys
        if apart := max(pairs, default=0.0):
            # Pairs of equal bits do not show how far apart others may be.
            self.auditor.tolerance.learn(apart)
        distances = np.concatenate([compared[key].distances for key in keys], axis=2)
        tolerance = 0.0 if self._is_exact else self.auditor.tolerance.value
        size = distances.shape[2] // len(keys)
        return self.auditor.judge(distances, replace(piece, tolerance=tolerance, block_tokens=size))


def _distances(fresh: Bytes, stored: Bytes, layers: Layers) -> Distances:
    """Return the distances of ``stored`` from ``fresh``."""
    parts = [[part for each in layer for part in each.distances(fresh, stored)] for layer in layers]
    if len({len(layer) for layer in parts}) > 1:  # layers of several kinds
        parts = [[np.max(layer, axis=0).tolist()] for layer in parts]
    return stacked(parts)


def block_bytes(memory: Memory, offset: int, num_bytes: int) -> Bytes:
    """Return bytes of host memory in place."""
    place = (ctypes.c_uint8 * num_bytes).from_address(memory.address + offset)
    return np.frombuffer(memoryview(place), np.uint8)
