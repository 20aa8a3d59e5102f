"""Names of blocks: labels for the index, chained keys for disk, remote and other processes.

A label is the block's token ids as bytes. Labels are compared in full, so a look-up in the index
needs no hash and can't collide. A key is needed only for blocks outside the process:

    key[-1] = BLAKE3(namespace)          key[i] = BLAKE3(key[i-1] || label[i])

A key thus identifies the whole prefix, the model and everything else that changes the bytes of a
block.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import TypeAlias, cast, overload

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtier.core.errors import ConfigError
from kvtier.core.hot import Keys, pack_tokens
from kvtier.core.types import BlockKey, Label

TOKEN_DTYPE = np.dtype("<u4")
"""Token ids in labels: little-endian, four bytes, the same on every machine."""


@dataclass(frozen=True)
class Namespace:
    """Everything besides tokens that must be equal before two prompts may share a block.

    Args:
        model: name of the model.
        revision: revision of its weights.
        dtype: data type of the KV.
        layout: fingerprint of the block's shape (``KVGroup.fingerprint``).
        block_size: tokens per block.
        adapter: LoRA or other adapter that changes the KV; "" for none.
        salt: separates tenants. Requests with different salts never share a block.
        codec: lossy codecs of the engine's stores; "" for none. KV that may have passed through
            them, or was computed after such KV, is not exact.
    """

    model: str
    revision: str
    dtype: str
    layout: str
    block_size: int
    adapter: str = ""
    salt: str = ""
    codec: str = ""

    @cached_property
    def digest(self) -> bytes:
        """Digest of this namespace, 32 bytes. Each field is hashed with its length.

        ``codec`` is left out if it is empty, so that exact KV keeps the names it always had.
        """
        hasher = blake3()
        for field in fields(self):
            if field.name == "codec" and not self.codec:
                continue
            value = str(getattr(self, field.name)).encode()
            hasher.update(len(value).to_bytes(8, "little"))
            hasher.update(value)
        return hasher.digest()


@cache
def _key_type(key_bytes: int) -> np.dtype[np.void]:
    """Return the type of a key in an array."""
    return np.dtype((np.void, key_bytes))


class PackedKeys(Sequence[bytes]):
    """Keys of one length, one after the other in one buffer. Immutable.

    A sequence of bytes in Python, and one piece of memory to the native core.

    Attributes:
        array: the keys: void [num_keys], contiguous.

    Args:
        content: the keys.
        key_bytes: length of each.
    """

    __slots__ = ("array",)

    def __init__(self, content: bytes | npt.NDArray[np.generic], key_bytes: int) -> None:
        self.array: npt.NDArray[np.void] = np.frombuffer(content, _key_type(key_bytes))

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> PackedKeys: ...
    def __getitem__(self, at: int | slice) -> bytes | PackedKeys:
        return self.select(at) if isinstance(at, slice) else self.array[at].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedKeys):
            return NotImplemented
        mine, theirs = self.array, other.array
        return len(mine) == len(theirs) and mine.tobytes() == theirs.tobytes()

    __hash__ = None  # type: ignore[assignment]  # as lists have none

    def select(self, which: slice | npt.NDArray[np.bool_ | np.int64]) -> PackedKeys:
        """Return the keys at some positions, or where a mask is True."""
        chosen = np.ascontiguousarray(self.array[which])
        return PackedKeys(chosen, chosen.itemsize)


def select_keys(keys: Sequence[bytes], positions: Iterable[int]) -> Sequence[bytes]:
    """Return the keys at some positions, packed if ``keys`` are."""
    if isinstance(keys, PackedKeys):
        return keys.select(np.asarray(positions, np.int64))
    return [keys[at] for at in positions]


TokenArray: TypeAlias = "npt.NDArray[np.integer] | array[int]"
"""Token ids in the engine's own array."""


class Labels(Sequence[Label]):
    """Labels of a prompt's blocks, over one buffer of token ids. Immutable.

    A sequence of bytes in Python, and one piece of memory to the native core.

    Args:
        tokens: ids as bytes, little-endian, four each; or an array of ids (see ``view_labels``).
        block_bytes: token bytes of one block, four per token.
        blocks_per_chunk: blocks per chunk; the label of a chunk's first block is the tokens of
            the whole chunk. 1 for no chunks.
        first: first block, counted from the start of the buffer.
        num: number of blocks.
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
        # One tuple: the native core unpacks it with fewer look-ups than five attributes.
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
        """Hash the whole prompt on the calling thread, and keep its keys for later.

        Cost: half a microsecond per block. The labels must begin with the prompt's first block.
        """
        assert self.spec[3] == 0, "keys are computed from the first block on"
        self._computed = namespace, next_keys(namespace, self)

    def computed_keys(self, namespace: bytes) -> Sequence[BlockKey] | None:
        """Return the blocks' keys if ``compute_keys`` was called, here or on a longer slice."""
        known_in, keys = getattr(self, "_computed", (None, ()))
        first, num = self.spec[3:]
        return keys[first : first + num] if known_in == namespace else None

    def check(self) -> None:
        """Raise ``ValueError`` if blocks lie outside the tokens, or are no whole number of tokens.

        An index calls this before it reads the labels.
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
    """Return the labels of a prompt's full blocks; a partial last block has none.

    Returns ``len(tokens) // block_size`` labels of ``4 * block_size`` bytes.

    tokens: integers in 0 .. 2**32 - 1, in prompt order, one axis; they are copied.
    """
    if block_size < 1:
        raise ConfigError(f"block_size={block_size} is below 1")
    packed = pack_tokens(tokens)
    if packed is None:
        packed = _packed(tokens)
    width = block_size * 4
    return Labels(packed, width, 1, 0, len(packed) // width)


def view_labels(tokens: TokenArray, block_size: int) -> Labels:
    """Return the labels of a prompt's full blocks without copying its tokens.

    Use the result only as long as ``tokens`` does not change. The tokens are not read here: an id
    outside 0 .. 2**32 - 1 raises ValueError in a later call that changes the index, or in a query
    that reads it.

    tokens: contiguous integers of four or eight bytes.
    """
    # Calling Labels() would add a tenth to the cost of a short look-up.
    labels = _new_labels(Labels)
    labels.spec = (tokens, block_size * 4, 1, 0, len(tokens) // block_size)
    return labels


def grid_labels(
    tokens: Sequence[int] | npt.NDArray[np.integer], block_size: int, chunk_tokens: int
) -> Labels:
    """Return the labels of a prompt's whole chunks, for an engine that computes on a grid.

    The bits of a block may depend on all tokens that were computed with it: in a mixture of
    experts, they decide how many rows each expert multiplies. So the label of a chunk's first block
    is the tokens of the whole chunk, and its other blocks are shared only if the whole chunk is
    equal. A partial last chunk has no labels.

    Args:
        tokens: as in ``token_labels``.
        block_size: tokens per block.
        chunk_tokens: tokens per chunk; a multiple of ``block_size``.
    """
    assert chunk_tokens % block_size == 0, "a chunk is a whole number of blocks"
    packed, width, _, _, num = token_labels(tokens, block_size).spec
    per_chunk = chunk_tokens // block_size
    return Labels(packed, width, per_chunk, 0, num - num % per_chunk)


def _packed(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Return the ids as bytes, from any sequence or array; raise ``ConfigError`` for bad ids."""
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
    """Return the key of the block with ``label`` after the prefix with key ``previous``."""
    return BlockKey(blake3(previous + label).digest())


def child_keys(previous: bytes, labels: Iterable[Label]) -> list[BlockKey]:
    """Return the key of each label's block, all after the prefix with key ``previous``."""
    hasher = blake3()  # one for all blocks, as in ``next_keys``
    keys: list[BlockKey] = []
    for label in labels:
        keys.append(BlockKey(hasher.update(previous + label).digest()))
        hasher.reset()
    return keys


def keys_along(
    namespace: bytes, labels: Sequence[Label], first: int, num: int, before: bytes
) -> Sequence[BlockKey]:
    """Return the keys of some blocks of a prompt, computed ahead or now.

    Args:
        namespace: the prompt's namespace.
        labels: the prompt's labels.
        first: position of the first block.
        num: number of blocks.
        before: key of the block before ``first``, or the namespace.
    """
    some = labels[first : first + num]
    known = some.computed_keys(namespace) if isinstance(some, Labels) else None
    return next_keys(before, some) if known is None else known


def next_keys(previous: bytes, labels: Sequence[Label]) -> Sequence[BlockKey]:
    """Return the keys of consecutive blocks after the prefix with key ``previous``."""
    hasher = blake3()  # one for all blocks: making one takes longer than hashing a block
    keys: list[bytes] = []
    for label in labels:
        previous = hasher.update(previous + label).digest()
        hasher.reset()
        keys.append(previous)
    return cast("Sequence[BlockKey]", Keys(keys))
