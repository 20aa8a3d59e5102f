"""Attention of decode steps: one new token for each of many sequences.

Contexts are gathered from the pool tile by tile, padded to the longest of the tile, and attended to
with one call per tile. So the number of calls depends on the tokens read, not on the sequences. The
gathered rows and the padding are the same in every layer and computed once per step.

A tile fits into a processor's cache between the gather and the attention. A sequence that fills
most of a tile has one of its own, and is not gathered if its slots are contiguous.

A sequence's result does not depend on the others: its tile depends only on its own length if it is
alone, lengths are rounded up to whole vectors, so that sums have the same order in any tile, and
padding adds exact zeros. (This does not hold for the products with the model's weights:
docs/decisions/0022. Nor need it for soft caps and sinks, whose products are torch's own.)

Layers with a window have tiles of their own, of the last tokens of each sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.core.errors import ConfigError
from kvtier.serve.engine.attention import AttentionParams, attention
from kvtier.serve.engine.paged import TOO_FAR, PagedKV, Span, blocks_between, ring_rows, ring_table
from kvtier.serve.engine.pool import KVPool, Rows

VECTOR = 16
"""Lengths are padded to multiples of this: the float32 lanes of the widest vector registers."""

CPU_TILE_BYTES = 1 << 20
"""K of one tile. The next cache level is four to eight times slower to read."""

DEVICE_TILE_BYTES = 128 << 20
"""K of one tile on devices with expensive calls; limits the memory of a tile."""

PADDING_TOKENS = 512
"""Padding up to this size is cheaper than another call."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sequences ``first .. last`` of a step, which share one attention call.

    length: of each context, including padding.
    where: its rows in the pool. Padding uses rows of the sequence itself, because others may hold
    NaN.
    mask: [num_sequences, 1, 1, length], added to scores; None without padding.
    """

    first: int
    last: int
    length: int
    where: Rows
    mask: torch.Tensor | None

    @property
    def num_rows(self) -> int:
        return (self.last - self.first) * self.length


class BatchKV(PagedKV):
    """One new token of each of ``spans``, which are sorted by length."""

    def __init__(self, pool: KVPool, spans: Sequence[Span]) -> None:
        super().__init__(pool)
        self._ends = np.array([span.end for span in spans])
        assert (np.diff(self._ends) >= 0).all(), "sequences are sorted by length"
        self._slots = _table([span.slots for span in spans], pool.group.block_size, self._ends)
        self._rings = [ring_table(span.ring, pool) for span in spans] if pool.num_bundles else []
        self._ring_lengths = np.array([ring.shape[1] for ring in self._rings])
        self._ring_tables: dict[int, npt.NDArray[np.int64]] = {}
        self._new: dict[int | None, torch.Tensor] = {}
        self._tile_tokens = pool.tokens_in(CPU_TILE_BYTES if pool.is_on_cpu else DEVICE_TILE_BYTES)
        self._tiles: dict[tuple[int, int | None], list[Tile]] = {}
        if self._is_latent:
            self._all = torch.cat([pool.as_indices(tile.where) for tile in self._tiles_of(0, None)])

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, kwargs: object = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place = self._pool.places[layer]
        if place.bundle not in self._new:
            self._new[place.bundle] = self._pool.on_device(
                self._rows_at(self._ends - 1, place.bundle)
            )
        for part, new in enumerate((key, value)):
            self._pool.write(place.layer, part, self._new[place.bundle], new[0].transpose(0, 1))
        if not self._is_latent:
            return self._keep(key, value)
        key, value = (
            self._pool.gather(place.layer, part, self._all)[None].transpose(1, 2) for part in (0, 1)
        )
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._ends[-1]) - 1

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        form: AttentionParams,
    ) -> torch.Tensor:
        """Attend; query heads that share a KV head are folded into the token axis."""
        num_heads, num_sequences, dim = query.shape[1:]
        heads = key.shape[1]
        queries = query[0].transpose(0, 1).reshape(num_sequences, heads, num_heads // heads, dim)
        place = self._pool.places[layer if self._is_latent else self._source(layer, key, value)]
        results, at = [], 0
        for tile in self._tiles_of(form.window, place.bundle):
            keys, values = (
                self._cut(whole, tile, at)
                if self._is_latent
                else self._context(place.layer, part, tile)
                for part, whole in enumerate((key, value))
            )
            results.append(
                attention(queries[tile.first : tile.last], keys, values, tile.mask, form)
            )
            at += tile.num_rows
        joined = results[0] if len(results) == 1 else torch.cat(results)
        return joined.reshape(1, num_sequences, num_heads, -1)

    def _tiles_of(self, window: int, bundle: int | None) -> list[Tile]:
        """Return the tiles of the last ``window`` tokens of each sequence, or of all for 0.

        bundle: where the layers are that read them; see ``Place``.
        """
        if window >= self._ends[-1]:
            window = 0
        if (window, bundle) not in self._tiles:
            starts = np.maximum(self._ends - window, 0) if window else np.zeros_like(self._ends)
            size = self._pool.group.block_size
            if bundle is not None and (
                (blocks_between(starts, self._ends, size) > self._ring_lengths).any()
            ):
                raise ConfigError(TOO_FAR)
            self._tiles[window, bundle] = [
                self._tile(*bounds, starts, bundle)
                for bounds in tiles((self._ends - starts).tolist(), self._tile_tokens)
            ]
        return self._tiles[window, bundle]

    def _context(self, layer: int, part: int, tile: Tile) -> torch.Tensor:
        """Return [num_sequences, num_heads, length, dim], valid until the next call."""
        rows = self._pool.gather(layer, part, tile.where)
        return rows.view(-1, tile.length, *rows.shape[1:]).transpose(1, 2)

    def _cut(self, whole: torch.Tensor, tile: Tile, at: int) -> torch.Tensor:
        """Return the same part of contexts that the model has expanded."""
        heads = whole[0, :, at : at + tile.num_rows]
        return heads.view(len(heads), -1, tile.length, heads.shape[-1]).transpose(0, 1)

    def _tile(
        self, first: int, last: int, starts: npt.NDArray[np.int64], bundle: int | None
    ) -> Tile:
        """Return the tile of some sequences, each from its start to its end."""
        starts = starts[first:last]
        ends = self._ends[first:last] - starts
        length = int(ends[-1])
        if is_alone(length, self._tile_tokens):
            slots, start = self._slots[first].tolist(), int(starts[0])
            end = start + length
            where = (
                self._pool.rows(slots, start, end)
                if bundle is None
                else ring_rows(self._pool, self._rings[first][bundle], start, end)
            )
            return Tile(first, last, length, where, None)
        length = padded(length)
        rows = self._rows_from(first, last, starts, length, bundle)
        is_padding = np.arange(length) >= ends[:, None]
        where = self._pool.on_device(np.where(is_padding, rows[:, :1], rows).ravel())
        return Tile(first, last, length, where, self._mask(is_padding))

    def _rows_from(
        self,
        first: int,
        last: int,
        starts: npt.NDArray[np.int64],
        length: int,
        bundle: int | None,
    ) -> npt.NDArray[np.int64]:
        """Return the rows of ``length`` tokens of each sequence; past its end they mean nothing."""
        size = self._pool.group.block_size
        if bundle is None and not starts.any():
            blocks = self._slots[first:last, : -(-length // size)]
            rows = blocks[:, :, None] * size + np.arange(size)
            return rows.reshape(last - first, -1)[:, :length]
        positions = np.minimum(
            starts[:, None] + np.arange(length), self._ends[first:last, None] - 1
        )
        slots = self._slots_at(first, last, positions // size, bundle)
        found: npt.NDArray[np.int64] = slots * size + positions % size
        return found

    def _slots_at(
        self, first: int, last: int, blocks: npt.NDArray[np.int64], bundle: int | None
    ) -> npt.NDArray[np.int64]:
        """Return the slots of some blocks of each sequence: int64 [num_sequences, num_blocks]."""
        table = self._slots
        if bundle is not None:
            blocks = blocks % self._ring_lengths[first:last, None]
            if bundle not in self._ring_tables:
                made = np.zeros((len(self._rings), self._ring_lengths.max()), np.int64)
                for row, ring in zip(made, self._rings, strict=True):
                    row[: ring.shape[1]] = ring[bundle]
                self._ring_tables[bundle] = made
            table = self._ring_tables[bundle]
        found: npt.NDArray[np.int64] = np.take_along_axis(table[first:last], blocks, 1)
        return found

    def _mask(self, is_padding: npt.NDArray[np.bool_]) -> torch.Tensor | None:
        if not is_padding.any():
            return None
        mask = np.where(is_padding, np.float32("-inf"), np.float32(0))
        return self._pool.on_device(mask[:, None, None]).to(self._pool.dtype)

    def _rows_at(
        self, positions: npt.NDArray[np.int64], bundle: int | None
    ) -> npt.NDArray[np.int64]:
        """Return the rows of one position of each sequence."""
        size = self._pool.group.block_size
        slots = self._slots_at(0, len(positions), positions[:, None] // size, bundle)[:, 0]
        return slots * size + positions % size


def tiles(ends: Sequence[int], tile_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of the sequences of each tile.

    A tile has at most ``tile_tokens`` rows unless a sequence alone needs more. At most a fifth of
    it is padding beyond whole vectors, or a negligible amount.

    ends: lengths of the sequences, ascending.
    """
    first = num_used = 0
    for at, end in enumerate(ends):
        length = padded(end)
        num_used += length
        num_rows = (at + 1 - first) * length
        is_full = num_rows > tile_tokens or is_alone(end, tile_tokens)
        if at > first and (is_full or num_rows - num_used > max(PADDING_TOKENS, num_used // 4)):
            yield first, at
            first, num_used = at, length
    yield first, len(ends)


def is_alone(length: int, tile_tokens: int) -> bool:
    """Whether a context of this length has a tile of its own."""
    return length > tile_tokens // 2


def padded(length: int) -> int:
    """Return the length rounded up to whole vectors."""
    return -(-length // VECTOR) * VECTOR


def _table(
    slots: Sequence[Sequence[int]], block_size: int, ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return [num_sequences, blocks of the longest padded]: the slots of each, filled with 0."""
    width = -(-padded(int(ends[-1])) // block_size)
    table = np.zeros((len(slots), width), np.int64)
    for row, slot, end in zip(table, slots, ends.tolist(), strict=True):
        num_blocks = -(-end // block_size)
        row[:num_blocks] = slot[:num_blocks]
    return table
