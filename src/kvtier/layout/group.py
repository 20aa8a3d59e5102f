"""A group of layers that share one kind of attention, and their content per token."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from kvtier.core.errors import LayoutError


class Attention(StrEnum):
    """Kinds of attention, by the KV that a prefix has."""

    FULL = "full"
    """K and V of every token, per KV head (MHA, GQA, MQA)."""
    LATENT = "latent"
    """One compressed latent and one rotary key per token (MLA), which have different widths."""
    SLIDING = "sliding"
    """K and V of the last ``window`` tokens."""
    RECURRENT = "recurrent"
    """A state of fixed size; a snapshot at the block's end."""


class DType(StrEnum):
    """Element types of KV."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"
    UINT8 = "uint8"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return {"float32": 4, "float16": 2, "bfloat16": 2}.get(self.value, 1)


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors of a layer: ``[num_tokens, num_heads, dim]``.

    per_token: False for a state with one copy per block (recurrent layers): ``[1, num_heads,
    dim]``.
    """

    name: str
    num_heads: int
    dim: int
    per_token: bool = True

    def __post_init__(self) -> None:
        _make_integers(self, "num_heads", "dim")


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of one kind. A block is ``block_size`` tokens of all its layers and parts.

    window: tokens that a sliding layer attends to; 0 for every other kind.
    """

    attention: Attention
    num_layers: int
    parts: tuple[Part, ...]
    dtype: DType
    block_size: int
    window: int = 0

    def __post_init__(self) -> None:
        try:
            # The fingerprint uses the repr of fields: "float32" has to become DType.FLOAT32.
            object.__setattr__(self, "dtype", DType(self.dtype))
        except ValueError:
            known = ", ".join(DType)
            raise LayoutError(f"dtype={self.dtype!r} is unknown; use one of {known}") from None
        _make_integers(self, "num_layers", "block_size", "window")
        sizes = [self.num_layers, self.block_size, len(self.parts)]
        sizes += [size for part in self.parts for size in (part.num_heads, part.dim)]
        if min(sizes) < 1:
            raise LayoutError(f"a KV group needs at least one of everything, got {self}")
        if (self.attention is Attention.SLIDING) != (self.window > 0):
            raise LayoutError(
                f"window={self.window} with {self.attention} attention; "
                "a window belongs to sliding layers, and only to them"
            )

    def tokens_of(self, part: Part) -> int:
        """Return the entries along the token axis of ``part`` in one block."""
        return self.block_size if part.per_token else 1

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: all layers, all parts."""
        elements = sum(self.tokens_of(part) * part.num_heads * part.dim for part in self.parts)
        return self.num_layers * elements * self.dtype.itemsize

    @property
    def fingerprint(self) -> str:
        """Name of the block's content, not of its arrangement: equal if blocks can be exchanged."""
        return blake2b(repr(self).encode(), digest_size=8).hexdigest()


def _make_integers(sizes: Part | KVGroup, *names: str) -> None:
    """Convert the fields to plain ints, from any integer type."""
    for name in names:
        value = getattr(sizes, name)
        try:
            object.__setattr__(sizes, name, operator.index(value))
        except TypeError:
            raise LayoutError(f"{name}={value!r} is no integer; give a whole number") from None


def full_attention(
    num_layers: int, num_kv_heads: int, head_dim: int, dtype: DType, block_size: int
) -> KVGroup:
    """Return a group with K and V per KV head: MHA, GQA and MQA models (Llama, Qwen3)."""
    parts = (Part("k", num_kv_heads, head_dim), Part("v", num_kv_heads, head_dim))
    return KVGroup(Attention.FULL, num_layers, parts, dtype, block_size)


def latent_attention(
    num_layers: int, kv_lora_rank: int, rope_dim: int, dtype: DType, block_size: int
) -> KVGroup:
    """Return a group with a latent and a rotary key per token: MLA models (DeepSeek-V2, V3)."""
    parts = (Part("latent", 1, kv_lora_rank), Part("rope", 1, rope_dim))
    return KVGroup(Attention.LATENT, num_layers, parts, dtype, block_size)


def sliding_attention(
    num_layers: int, num_kv_heads: int, head_dim: int, window: int, dtype: DType, block_size: int
) -> KVGroup:
    """Return a group with K and V of the last ``window`` tokens (Gemma3, GPT-OSS)."""
    parts = (Part("k", num_kv_heads, head_dim), Part("v", num_kv_heads, head_dim))
    return KVGroup(Attention.SLIDING, num_layers, parts, dtype, block_size, window)


def recurrent_state(
    num_layers: int, states: tuple[tuple[str, int, int], ...], dtype: DType, block_size: int
) -> KVGroup:
    """Return a group with snapshots of fixed size at block ends (Qwen3-Next, Mamba).

    states: (name, rows, columns).
    """
    parts = tuple(Part(name, rows, columns, per_token=False) for name, rows, columns in states)
    return KVGroup(Attention.RECURRENT, num_layers, parts, dtype, block_size)


def opaque(num_bytes: int) -> KVGroup:
    """Return a group of blocks of ``num_bytes`` whose content only their engine understands.

    The part's name must not change: slabs are identified by it.
    """
    return KVGroup(Attention.FULL, 1, (Part("chunk", 1, num_bytes),), DType.UINT8, block_size=1)
