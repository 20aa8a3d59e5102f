"""Names of blocks: labels for the index, chained keys for disk, remote and other processes.

A label is the block's token ids as bytes and is compared in full, so a look-up in the index needs
no hash and can't collide. A key is needed only where a block leaves the process:

    key[-1] = BLAKE3(namespace)          key[i] = BLAKE3(key[i-1] || label[i])

so a key names the whole prefix, the model and everything else that changes the bytes of a block.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeAlias, cast, overload

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtier._hot import Keys, pack_tokens
from kvtier.errors import ConfigError
from kvtier.types import BlockKey, Label

TOKEN_DTYPE = np.dtype("<u4")
"""Token ids in labels: little-endian, four bytes, the same on every machine."""


@dataclass(frozen=True)
class Namespace:
    """Everything that must agree before two prompts may share a block.

    layout: fingerprint of the block's shape (``KVGroup.fingerprint``).
    adapter: LoRA or other adapter that changes the KV, "" for none.
    salt: separates tenants: requests with different salts never share a block.
    """

    model: str
    revision: str
    dtype: str
    layout: str
    block_size: int
    adapter: str = ""
    salt: str = ""

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name this namespace: each field with its length, so that none runs on."""
        hasher = blake3()
        for field in fields(self):
            value = str(getattr(self, field.name)).encode()
            hasher.update(len(value).to_bytes(8, "little"))
            hasher.update(value)
        return hasher.digest()


TokenArray: TypeAlias = "npt.NDArray[np.integer] | array[int]"
"""Token ids of an engine, as they are."""


class Labels(Sequence[Label]):
    """The labels of a prompt's blocks, over one buffer of token ids.

    A list of bytes to whoever reads it, and a piece of memory to the native core. Not changed once
    made.

    tokens: ids as bytes, little-endian, four each; or an array of theirs (see ``view_labels``).
    block_bytes: as bytes, of one block. blocks_per_chunk: every so many blocks one is called
    by the tokens of as many blocks from it on; 1 where there are no chunks. first, num: the
    blocks that it stands for, counted from the start of the buffer.
    """

    __slots__ = ("_computed", "spec")

    def __init__(
        self,
        tokens: bytes | TokenArray,
        block_bytes: int,
        blocks_per_chunk: int,
        first: int,
        num: int,
    ) -> None:
        # One tuple: the native core takes it apart with fewer look-ups than five attributes.
        self.spec = (tokens, block_bytes, blocks_per_chunk, first, num)

    def __len__(self) -> int:
        return self.spec[4]

    @overload
    def __getitem__(self, at: int) -> Label: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Label]: ...
    def __getitem__(self, at: int | slice) -> Label | Sequence[Label]:
        tokens, block_bytes, blocks_per_chunk, first, num = self.spec
        if isinstance(at, slice):
            start, stop, step = at.indices(num)
            if step != 1:
                return [self[position] for position in range(start, stop, step)]
            part = Labels(
                tokens, block_bytes, blocks_per_chunk, first + start, max(stop - start, 0)
            )
            if hasattr(self, "_computed"):
                part._computed = self._computed
            return part
        if not -num <= at < num:
            raise IndexError(f"block {at} of a prompt with {num} full blocks")
        block = first + at % num
        begins_chunk = block % blocks_per_chunk == 0
        start, width = block * block_bytes, block_bytes * (blocks_per_chunk if begins_chunk else 1)
        if isinstance(tokens, bytes):
            return tokens[start : start + width]
        return _packed(np.asarray(tokens[start // 4 : (start + width) // 4]))

    def __iter__(self) -> Iterator[Label]:
        tokens, block_bytes, blocks_per_chunk, first, num = self.spec
        start, end = first * block_bytes, (first + num) * block_bytes
        if isinstance(tokens, bytes):
            packed = tokens[start:end]
        else:
            packed = _packed(np.asarray(tokens[start // 4 : end // 4]))
        # All in one step: cutting them out one by one takes five times as long.
        labels: list[Label] = np.frombuffer(packed, f"V{block_bytes}").tolist() if num else []
        if blocks_per_chunk > 1:
            for at in range(-first % blocks_per_chunk, num, blocks_per_chunk):
                labels[at] = self[at]
        return iter(labels)

    def compute_keys(self, namespace: bytes) -> None:
        """Hash the whole prompt, for whoever asks for its keys later.

        Half a microsecond a block, on the thread that calls. These labels must be its first ones.
        """
        assert self.spec[3] == 0, "keys are computed from the first block on"
        self._computed = namespace, next_keys(namespace, self)

    def computed_keys(self, namespace: bytes) -> Sequence[BlockKey] | None:
        """The blocks' keys, where ``compute_keys`` was called before, here or of a longer part."""
        known_in, keys = getattr(self, "_computed", (None, ()))
        first, num = self.spec[3:]
        return keys[first : first + num] if known_in == namespace else None

    def check(self) -> None:
        """Raise ``ValueError`` where the blocks are not within the tokens, or no whole tokens.

        An index does so before it reads them.
        """
        tokens, block_bytes, blocks_per_chunk, first, num = self.spec
        num_bytes = len(tokens) if isinstance(tokens, bytes) else 4 * len(tokens)
        has_sense = block_bytes > 0 and blocks_per_chunk > 0 and first >= 0 and num >= 0
        num_chunks = -(-(first + num) // blocks_per_chunk) if has_sense else 0
        if not has_sense or num_chunks * blocks_per_chunk * block_bytes > num_bytes:
            raise ValueError(
                f"Labels name blocks outside of their tokens: block_bytes={block_bytes}, "
                f"blocks_per_chunk={blocks_per_chunk}, first={first}, num={num} in "
                f"{num_bytes} bytes"
            )
        if not isinstance(tokens, bytes) and block_bytes % 4:
            raise ValueError(
                f"Labels of {block_bytes} bytes a block are no whole number of token ids"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Labels, list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none

    def __repr__(self) -> str:
        return f"Labels({list(self)!r})"


_new_labels = Labels.__new__


def token_labels(tokens: Sequence[int] | npt.NDArray[np.integer], block_size: int) -> Labels:
    """Labels of the full blocks of a prompt; a last, partial block has none.

    tokens: integers in 0 .. 2**32 - 1, prompt order, one axis; they are copied.
    Returns ``len(tokens) // block_size`` labels of ``4 * block_size`` bytes.
    """
    if block_size < 1:
        raise ConfigError(f"block_size={block_size} is below 1")
    packed = pack_tokens(tokens)
    if packed is None:
        packed = _packed(tokens)
    width = block_size * 4
    return Labels(packed, width, 1, 0, len(packed) // width)


def view_labels(tokens: TokenArray, block_size: int) -> Labels:
    """``token_labels`` without a copy, for a call that is over before ``tokens`` changes.

    tokens: contiguous integers of four or eight bytes; nothing of them is read here. An id outside
    of 0 .. 2**32 - 1 is a ValueError of the call that changes something, and of a query that
    meets it.
    """
    # A call of Labels would cost a tenth of what a short look-up does.
    labels = _new_labels(Labels)
    labels.spec = (tokens, block_size * 4, 1, 0, len(tokens) // block_size)
    return labels


def grid_labels(
    tokens: Sequence[int] | npt.NDArray[np.integer], block_size: int, chunk_tokens: int
) -> Labels:
    """Labels of the blocks of a prompt's whole chunks, for an engine that computes on a grid.

    The bits of a block may depend on all tokens that were computed with it: where a model routes
    tokens to experts, they decide how many rows each expert multiplies. So the first block of a
    chunk is called by the tokens of the whole chunk, and the blocks below it in the trie are
    shared only where the whole chunk agrees.

    chunk_tokens: a multiple of ``block_size``; a last, partial chunk has no labels.
    """
    assert chunk_tokens % block_size == 0, "a chunk is a whole number of blocks"
    packed, width, _, _, num = token_labels(tokens, block_size).spec
    per_chunk = chunk_tokens // block_size
    return Labels(packed, width, per_chunk, 0, num - num % per_chunk)


def _packed(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """The ids as bytes, from any sequence or array; or what is wrong with them."""
    ids = np.asarray(tokens)
    if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iuO"):
        raise ConfigError(
            f"token ids must be integers along one axis, got {ids.dtype} {ids.shape}; "
            "give one prompt at a time, as a list or an integer array"
        )
    if ids.size and (ids.min() < 0 or ids.max() > 0xFFFF_FFFF):
        raise ConfigError(
            f"token ids must lie in 0 .. 2**32 - 1, got {ids.min()} .. {ids.max()}; "
            "map padding or special ids before asking the cache"
        )
    return ids.astype(TOKEN_DTYPE).tobytes()


def next_key(previous: bytes, label: Label) -> BlockKey:
    """Key of the block with ``label`` after the prefix that ``previous`` names."""
    return BlockKey(blake3(previous + label).digest())


def keys_along(
    namespace: bytes, labels: Sequence[Label], first: int, num: int, before: bytes
) -> Sequence[BlockKey]:
    """Keys of blocks of a prompt, ``num`` of them from ``first`` on: computed ahead, or else now.

    before: the key in front of them, or the namespace.
    """
    some = labels[first : first + num]
    known = some.computed_keys(namespace) if isinstance(some, Labels) else None
    return next_keys(before, some) if known is None else known


def next_keys(previous: bytes, labels: Sequence[Label]) -> Sequence[BlockKey]:
    """Return the keys of blocks below each other, the first after the prefix ``previous``."""
    hasher = blake3()  # one for all: to make one takes longer than to hash a block
    keys: list[bytes] = []
    for label in labels:
        previous = hasher.update(previous + label).digest()
        hasher.reset()
        keys.append(previous)
    return cast("Sequence[BlockKey]", Keys(keys))
