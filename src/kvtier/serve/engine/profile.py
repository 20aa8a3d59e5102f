"""Measures a model's KV: a short forward whose cache and attention only look at what they get."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from kvtier.connectors.transformers.cache_layers import cache_argument
from kvtier.core.errors import ConfigError, printable
from kvtier.layout import Attention, DType, KVGroup, Part, latent_attention
from kvtier.serve.engine.attention import AttentionParams
from kvtier.serve.engine.paged import ATTENTION, ForwardKV
from kvtier.serve.engine.pool import KVPool
from kvtier.serve.engine.runner import ModelRunner, Runner
from kvtier.serve.engine.windows import WindowLayers, WindowRunner

NUM_TOKENS = 3
"""Tokens of the forward: their number differs from one, for shapes that depend on it."""

SERVED_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
"""Classes of cache layers that the paged runner serves: K and V of tokens, or nothing."""

MAX_REASON = 200
"""Characters of a library's own message."""


class MeasuredModel(ABC):
    """KV of a model, as it was seen to use it, and the runner that serves it.

    Attributes:
        num_layers: layers with KV.
        windows: those of its layers, ascending; without the layers that have none.
        bytes_per_token: KV of a token.
        bytes_per_snapshot: a state of all recurrent layers; 0 without any.
        runner_name: "paged" or "layers".
        slow_because: why paged attention can't serve it; "" if it does.
    """

    runner_name: ClassVar[str]
    slow_because: str = ""
    num_layers: int
    windows: tuple[int, ...]
    bytes_per_token: int
    bytes_per_snapshot: int = 0

    @abstractmethod
    def group(self, block_size: int) -> KVGroup:
        """Return the layout of a block with the KV of every token and layer."""

    def pool_group(self, block_size: int) -> KVGroup:
        """Return the layout of a block of the runner's pool."""
        return self.group(block_size)

    def pool_blocks(self, num_blocks: int, block_size: int, chunk_tokens: int) -> int:
        """Return the blocks of a pool in which a sequence of ``num_blocks`` blocks is computed."""
        return num_blocks + self.blocks_per_snapshot(block_size)

    def room(self, pool_blocks: int, block_size: int, chunk_tokens: int) -> int:
        """Return the blocks of the longest request that a pool of ``pool_blocks`` has room for."""
        # Beside its KV it has the snapshot that it begins from, and one that it makes.
        return pool_blocks - 2 * self.blocks_per_snapshot(block_size)

    @abstractmethod
    def blocks_per_snapshot(self, block_size: int) -> int:
        """Return how many blocks a snapshot of the recurrent layers takes."""

    @abstractmethod
    def features(self) -> str:
        """Return the kinds of layers, for people."""

    @abstractmethod
    def make_runner(
        self, module: PreTrainedModel, block_size: int, num_blocks: int, chunk_tokens: int
    ) -> Runner:
        """Return a runner of the model over ``num_blocks`` blocks."""


@dataclass(frozen=True)
class KVProfile(MeasuredModel):
    """KV and attention of a model that the paged runner serves.

    shapes: (heads, dim) of K and of V in every layer.
    is_latent: the model expands what it caches.
    layer_windows: of each layer with KV, the most tokens that an attention reads of it; 0 for all.
    num_shared: layers that attend to the KV of another one.
    """

    num_layers: int
    shapes: tuple[tuple[int, int], tuple[int, int]]
    dtype: torch.dtype
    is_latent: bool
    layer_windows: tuple[int, ...]
    has_softcap: bool
    has_sinks: bool
    num_shared: int

    runner_name: ClassVar[str] = "paged"

    @property
    def windows(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(sorted(set(self.layer_windows) - {0}))

    @property
    def window_layers(self) -> WindowLayers | None:
        """Places of the layers in blocks of few layers; None for a model without windows."""
        return WindowLayers.of(self.layer_windows)

    @property
    def bytes_per_token(self) -> int:  # type: ignore[override]
        return self.group(1).bytes_per_block

    def blocks_per_snapshot(self, block_size: int) -> int:
        return 0

    def make_runner(
        self, module: PreTrainedModel, block_size: int, num_blocks: int, chunk_tokens: int
    ) -> Runner:
        group, layers = self.pool_group(block_size), self.window_layers
        if layers is None:
            pool = KVPool(group, num_blocks, module.device, module.dtype)
            return ModelRunner(module, pool, chunk_tokens)
        pool = KVPool(group, num_blocks, module.device, module.dtype, layers.places)
        return WindowRunner(module, pool, layers, chunk_tokens)

    def pool_group(self, block_size: int) -> KVGroup:
        group, layers = self.group(block_size), self.window_layers
        return group if layers is None else replace(group, num_layers=layers.num_layers)

    def pool_blocks(self, num_blocks: int, block_size: int, chunk_tokens: int) -> int:
        layers = self.window_layers
        if layers is None:
            return num_blocks
        return num_blocks + layers.shape(block_size, chunk_tokens).ring_blocks(num_blocks)

    def room(self, pool_blocks: int, block_size: int, chunk_tokens: int) -> int:
        layers = self.window_layers
        return (
            pool_blocks
            if layers is None
            else layers.shape(block_size, chunk_tokens).room(pool_blocks)
        )

    def group(self, block_size: int) -> KVGroup:
        """Return the layout of the KV of every token, those that a window has passed included."""
        dtype = DType(str(self.dtype).removeprefix("torch."))
        (key_heads, key_dim), (value_heads, value_dim) = self.shapes
        if self.is_latent:
            return latent_attention(self.num_layers, key_dim, value_dim, dtype, block_size)
        parts = (Part("k", key_heads, key_dim), Part("v", value_heads, value_dim))
        return KVGroup(Attention.FULL, self.num_layers, parts, dtype, block_size)

    def features(self) -> str:
        found = ["latent (MLA)" if self.is_latent else "full"]
        if self.windows:
            found.append(f"windows of {', '.join(map(str, self.windows))} tokens")
        found += ["soft caps"] * self.has_softcap + ["sinks"] * self.has_sinks
        found += [f"{self.num_shared} layers with shared KV"] * bool(self.num_shared)
        return ", ".join(found)


@contextmanager
def attention_of(module: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the model use the attention function ``name`` for a while."""
    before = module.config._attn_implementation
    module.set_attn_implementation(name)
    try:
        yield
    finally:
        module.set_attn_implementation(before)


def refuse_layers(config: PreTrainedConfig, name: str, served: Collection[str], by: str) -> None:
    """Raise ``ConfigError`` if the configuration has other layers than those served.

    served: names of classes of transformers' cache layers.
    by: what serves them, for the message.
    """
    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:  # any type: it depends on the model's own classes
        raise ConfigError(
            f"model: {name!r} has layers that transformers' own cache does not know "
            f"({reason(error)}), so that the embedded engine can't restore a prefix of it"
        ) from error
    odd = {type(layer).__name__ for layer in layers} - set(served)
    if odd:
        text = config.get_text_config(decoder=True)
        known = {"full_attention", "sliding_attention", "moe", "mlp"}
        kinds = sorted(set(map(str, getattr(text, "layer_types", None) or odd)) - known)
        raise ConfigError(
            f"model: {name!r} has {', '.join(kinds or sorted(odd))} layers, whose cache is of a "
            f"kind that {by} can't restore"
        )


@torch.inference_mode()
def measure(module: PreTrainedModel, name: str) -> KVProfile:
    """Return the KV of a loaded model, which is left with the paged attention.

    Raises ``ConfigError`` if the paged attention can't serve it. Its numbers are not checked here:
    see ``self_check``.
    """
    module.set_attn_implementation(ATTENTION)
    if module.config._attn_implementation != ATTENTION:
        raise ConfigError(
            f"model: {name!r} is of type {module.config.model_type!r}, whose attention does not go "
            "through transformers' attention interface; paged attention can't replace it"
        )
    seen = ProbeKV()
    tokens = torch.arange(NUM_TOKENS, device=module.device)[None]
    try:
        cache = {cache_argument(module.forward): seen}
        module(input_ids=tokens, position_ids=tokens, use_cache=True, kv=seen, **cache)
    except ConfigError as error:
        raise ConfigError(f"model: {name!r}: {str(error).removeprefix('model: ')}") from error
    except Exception as error:  # any type: models differ in what they ask of a cache
        raise ConfigError(
            f"model: {name!r} is of type {module.config.model_type!r}, which can't use the "
            f"embedded engine's cache ({reason(error)})"
        ) from error
    return seen.profile(name, _windows_of_cache(module.config))


def _windows_of_cache(config: PreTrainedConfig) -> list[int]:
    """Return the window of each layer of transformers' own cache, 0 for none."""
    return [
        int(getattr(layer, "sliding_window", None) or 0)
        for layer in DynamicCache(config=config).layers
    ]


class ProbeKV(ForwardKV):
    """Records what a model caches, and what its attention gets. It attends to nothing."""

    def __init__(self) -> None:
        self._stored: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._calls: list[tuple[int, tuple[torch.Tensor, torch.Tensor], AttentionParams]] = []

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, kwargs: object = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._stored.append((layer, key, value))
        return key, value

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        form: AttentionParams,
    ) -> torch.Tensor:
        self._calls.append((layer, (key, value), form))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def profile(self, name: str, cache_windows: list[int]) -> KVProfile:
        """Return the result. Raises ``ConfigError`` if the pool can't hold it."""
        num_layers = len(self._stored)
        if not num_layers or [layer for layer, *_ in self._stored] != list(range(num_layers)):
            raise ConfigError(
                f"model: {name!r} does not keep K and V of its layers in the cache that it is "
                "given, one layer after the other; paged attention can't restore a prefix of it"
            )
        shapes = {(_shape(key), _shape(value), key.dtype) for _, key, value in self._stored}
        if len(shapes) > 1:
            raise ConfigError(
                f"model: {name!r} has {len(shapes)} kinds of layers, whose K and V differ in "
                "heads, width or dtype; paged attention serves one"
            )
        ((key_shape, value_shape, dtype),) = shapes
        own = {(id(key), id(value)): layer for layer, key, value in self._stored}
        sources = [own.get((id(key), id(value))) for _, (key, value), _ in self._calls]
        expanded = [source is None for source in sources]
        is_latent = any(expanded)
        windows = {form.window for *_, form in self._calls} - {0}
        read: dict[int, set[int]] = {layer: set() for layer in range(num_layers)}
        for source, (*_, form) in zip(sources, self._calls, strict=True):
            if source is not None:
                read[source].add(form.window)
        if len(self._calls) < num_layers:
            raise ConfigError(
                f"model: {name!r} calls attention {len(self._calls)} times for {num_layers} layers "
                "with KV; paged attention can't replace it"
            )
        if is_latent and (not all(expanded) or windows or key_shape[0] > 1 or value_shape[0] > 1):
            raise ConfigError(
                f"model: {name!r} changes K and V between its cache and its attention, with "
                f"{key_shape[0]} heads and {len(windows)} windows; paged attention serves that "
                "for latents (MLA) without windows"
            )
        for layer, _, form in self._calls:
            expected = cache_windows[layer] if layer < len(cache_windows) else 0
            if layer < num_layers and form.window != expected:
                raise ConfigError(
                    f"model: {name!r}: layer {layer} keeps {expected or 'all'} tokens in "
                    f"transformers' cache, but tells its attention a window of "
                    f"{form.window or 'all'}; paged attention does not know which to compute"
                )
        return KVProfile(
            num_layers=num_layers,
            shapes=(key_shape, value_shape),
            dtype=dtype,
            is_latent=is_latent,
            layer_windows=tuple(
                0 if 0 in each or not each else max(each) for each in read.values()
            ),
            has_softcap=any(form.softcap for *_, form in self._calls),
            has_sinks=any(form.sinks is not None for *_, form in self._calls),
            num_shared=0
            if is_latent
            else sum(at != source for (at, *_), source in zip(self._calls, sources, strict=True)),
        )


def reason(error: BaseException) -> str:
    """Return a library's own message as part of a sentence."""
    why = " ".join(str(error).split()).rstrip(".:")
    cut = f"{why[:MAX_REASON]} ..." if len(why) > MAX_REASON else why
    return printable(f"{type(error).__name__}: {cut}")


def _shape(each: torch.Tensor) -> tuple[int, int]:
    """Return (heads, dim) of [1, heads, num_tokens, dim]."""
    return int(each.shape[1]), int(each.shape[3])
