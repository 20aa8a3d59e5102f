"""Cache layers of transformers as blocks: shapes by a probe, and copies between a cache and blocks.

A block is K and V of a few tokens, of every layer that keeps them. Only transformers reads it, so
its content is a row of pieces, one per layer and tensor, each as transformers arranges it. The
state of recurrent layers has no token axis: a snapshot of it fills whole blocks of its own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvtier.cache.audit import Distances, stacked, token_distances
from kvtier.core.errors import CacheError
from kvtier.core.system.memory import available_bytes
from kvtier.layout import Attention, DType, KVGroup, Part

logger = logging.getLogger(__name__)

ALIGN_BYTES = 64
"""Pieces begin at multiples of this, so that each can be viewed as its dtype."""
PAGE_BYTES = 4096
"""Blocks end at multiples of this, so that disks can read them directly."""
RESERVE_BYTES = 1 << 30
"""Memory that stays free beside a model in float32."""
HALVES = (torch.float16, torch.bfloat16)
PLAIN = (torch.Tensor, torch.nn.Parameter)
PROBE_TOKENS = 2
CHECK_TOKENS = 12
MAX_DIFFERENCE, MAX_MEDIAN = 1e-2, 1e-1
"""Largest difference of a token's logits from those in one shot, relative to its largest logit: of
the worst token in float32, else of the median one: rounding sends tokens to other experts."""

SLIDING = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
INDEXER = "indexer_keys"
RECURRENT = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
WITHOUT_KV = [vars(cache_utils)[name] for name in ("DummyLayer",) if name in vars(cache_utils)]
"""Classes of layers that keep nothing; transformers 5.20 has none."""
INDEXED = tuple(
    vars(cache_utils)[name] for name in ("DynamicIndexedLayer",) if name in vars(cache_utils)
)
"""Classes of layers with an indexer's keys beside K and V, if this transformers has them."""
KNOWN_LAYERS = (DynamicLayer, *SLIDING, *RECURRENT, *INDEXED, *WITHOUT_KV)
"""Classes whose content is known here; a subclass may keep more."""

CACHE_FIELD = (
    "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
)
"""Name of the cache in outputs of transformers, which 5.24 has renamed."""


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name of the cache among the arguments of a model's ``forward``.

    It is that of transformers, except for older code that a checkpoint brings.
    """
    parameters = inspect.signature(forward).parameters
    is_older = CACHE_FIELD not in parameters and "past_key_values" in parameters
    return "past_key_values" if is_older else CACHE_FIELD


class UnsupportedModelError(CacheError):
    """A model whose KV cannot be reused here. Its message completes "because"."""


class NoFloat32Error(Exception):
    """A model cannot be computed in float32 here. Its message completes "because"."""


@dataclass(frozen=True, slots=True)
class Piece:
    """K, V or an indexer's keys of one layer in a block: [num_heads, block_tokens, dim].

    An indexer's keys (``indexer_keys``) have no axis of heads in transformers' cache layer.
    window: last tokens that the layer keeps, less one; 0 for all.
    offset, num_bytes: in the block.
    """

    layer: int
    name: str
    num_heads: int
    dim: int
    dtype: torch.dtype
    window: int
    offset: int
    num_bytes: int

    def of(self, cache: DynamicCache) -> torch.Tensor:
        """Return the tensor of a cache that blocks have pieces of: [batch, heads, tokens, dim]."""
        return _with_heads(getattr(cache.layers[self.layer], self.name), self.name)


@dataclass(frozen=True, slots=True)
class StatePiece:
    """A state of one recurrent layer in a snapshot, without the batch axis.

    name: "conv_states" or "recurrent_states". at: its number in the layer.
    offset, num_bytes: in the snapshot.
    """

    layer: int
    name: str
    at: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int


class CacheLayers:
    """The cache layers of a model, and the place of each in blocks and snapshots.

    Args:
        model: the model. It computes two tokens here, which shows the shapes.
        block_tokens: tokens per block.

    Attributes:
        group: shape of a block.
        blocks_per_snapshot: blocks that a snapshot of the state fills; 0 without recurrent layers.
        windows: those of sliding layers, ascending.

    Raises:
        UnsupportedModelError: the model has layers whose KV cannot be restored.
    """

    def __init__(self, model: PreTrainedModel, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._config = model.config
        self._made_for = model.dtype, model.device
        self.pieces: list[Piece] = []
        self.states: list[StatePiece] = []
        self._devices: list[torch.device] = []
        block, snapshot = _Row(), _Row()
        probe = self._probe(model)
        self._classes = [type(layer) for layer in probe.layers]
        for at, layer in enumerate(probe.layers):
            if type(layer) not in KNOWN_LAYERS:
                raise UnsupportedModelError(f"layer {at} keeps its KV in a {type(layer).__name__}")
            device = model.device
            if isinstance(layer, LinearAttentionLayer):
                self._add_states(at, layer, snapshot)
                device = layer.device or device
            if isinstance(layer, DynamicLayer):
                self._add_pieces(at, layer, block)
                device = layer.device if layer.keys is not None else device
            self._devices.append(device)
        self.windows = tuple(sorted({piece.window + 1 for piece in self.pieces} - {1}))
        num_bytes = max(PAGE_BYTES, -(-block.num_bytes // PAGE_BYTES) * PAGE_BYTES)
        content = Part("chunk", 1, num_bytes, per_token=False)
        self.group = KVGroup(Attention.FULL, 1, (content,), DType.UINT8, block_tokens)
        self.blocks_per_snapshot = -(-snapshot.num_bytes // num_bytes)

    def _add_pieces(self, at: int, layer: DynamicLayer, row: _Row) -> None:
        if not layer.is_initialized:
            raise UnsupportedModelError(f"layer {at} has no KV of its own")
        window = layer.sliding_window - 1 if isinstance(layer, SLIDING) else 0
        names = ["keys", "values"]
        if getattr(layer, INDEXER, None) is not None:  # layers may share the indexer of one
            names.append(INDEXER)
        if getattr(layer, "indexer_position_ids", None) is not None:
            raise UnsupportedModelError(f"layer {at} keeps positions beside its indexer's keys")
        for name in names:
            tensor = _with_heads(getattr(layer, name), name)
            if (
                tensor.ndim != 4
                or tensor.shape[0] != 1
                or tensor.shape[2] != min(PROBE_TOKENS, window or PROBE_TOKENS)
            ):
                raise UnsupportedModelError(f"layer {at} has {name} of shape {tuple(tensor.shape)}")
            heads, dim = int(tensor.shape[1]), int(tensor.shape[3])
            size = heads * self.block_tokens * dim * tensor.dtype.itemsize
            piece = Piece(at, name, heads, dim, tensor.dtype, window, row.add(size), size)
            self.pieces.append(piece)

    def _add_states(self, at: int, layer: LinearAttentionLayer, row: _Row) -> None:
        for name in ("conv_states", "recurrent_states"):
            for number, tensor in getattr(layer, name).items():
                if tensor is not None:
                    shape = tuple(tensor.shape[1:])
                    offset = row.add(tensor.nbytes)
                    self.states.append(
                        StatePiece(at, name, number, shape, tensor.dtype, offset, tensor.nbytes)
                    )

    def _probe(self, model: PreTrainedModel) -> DynamicCache:
        cache = DynamicCache(config=self._config)
        with torch.no_grad():
            ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=model.device)
            model(input_ids=ids, use_cache=True, **{cache_argument(model.forward): cache})
        if not cache.layers or not any(
            getattr(layer, "is_initialized", False)
            or any(getattr(layer, "has_previous_state", {}).values())
            for layer in cache.layers
        ):
            raise UnsupportedModelError("it uses no DynamicCache")
        if not any(isinstance(layer, DynamicLayer) for layer in cache.layers):
            # Its own cache then has no length, by which a model knows the positions of tokens.
            raise UnsupportedModelError("no layer of it has attention")
        return cache

    def refuse_broken(self, model: PreTrainedModel) -> None:
        """Raise ``UnsupportedModelError`` if the model does not continue its own cache.

        A dozen tokens are computed at once, and in two parts: in float32 if that is possible.
        Encoders look ahead, and Jamba drops its state where several tokens follow it.
        """
        if model.dtype is not torch.float32:
            try:
                with in_float32(model):
                    self._refuse_difference(model)
                return
            except UnsupportedModelError:
                raise
            except Exception as error:  # any type: a part of a model may insist on its dtype
                logger.info("a model is checked in %s, because %s", model.dtype, error)
        self._refuse_difference(model)

    def _refuse_difference(self, model: PreTrainedModel) -> None:
        ids = torch.arange(1, CHECK_TOKENS + 1, device=model.device)[None]
        cache = self.new_cache()

        def compute(first: int, end: int, cache: DynamicCache) -> torch.Tensor:
            options: dict[str, object] = {cache_argument(model.forward): cache}
            if "position_ids" in inspect.signature(model.forward).parameters:
                options["position_ids"] = torch.arange(first, end, device=model.device)[None]
            output = model(input_ids=ids[:, first:end], use_cache=True, **options)
            logits: torch.Tensor = output.logits[0].float()
            return logits

        with torch.no_grad():
            first = CHECK_TOKENS // 2
            whole = compute(0, CHECK_TOKENS, self.new_cache())[first:]
            compute(0, first, cache)
            parts = compute(first, CHECK_TOKENS, cache)
        scale = whole.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
        off = (whole - parts).abs().amax(-1) / scale
        is_exact = model.dtype is torch.float32
        difference = float(off.max() if is_exact else off.median())
        if difference > (MAX_DIFFERENCE if is_exact else MAX_MEDIAN):
            raise UnsupportedModelError(
                f"its logits differ by {difference:.0e} of their scale where a prompt is computed "
                "in two parts"
            )

    @property
    def bytes_per_snapshot(self) -> int:
        """Bytes of the blocks of a snapshot."""
        return self.blocks_per_snapshot * self.group.bytes_per_block

    @cached_property
    def fingerprint(self) -> str:
        """The content of a block and of a snapshot: equal if they can be exchanged."""
        return repr(self.pieces) + (repr(self.states) if self.states else "")

    def new_cache(self) -> DynamicCache:
        """Return an empty cache, as ``generate`` makes one."""
        return DynamicCache(config=self._config)

    def fit_model(self, model: PreTrainedModel) -> bool:
        """Whether the model has the dtype and the device that it was probed with."""
        return self._made_for == (model.dtype, model.device)

    def fits(self, cache: DynamicCache) -> bool:
        """Whether ``cache`` is empty, and has layers of the kinds that were probed."""
        if cache.offloading:
            return False
        if not cache.layers:
            is_plain = not self.states and not set(self._classes).intersection(INDEXED)
            return cache.layer_class_to_replicate is DynamicLayer and is_plain
        return [type(layer) for layer in cache.layers] == self._classes and all(
            map(_is_empty, cache.layers)
        )

    # -- KV of tokens ------------------------------------------------------------------------------

    def save(
        self, cache: DynamicCache, end: int, blocks: torch.Tensor, slots: Sequence[int]
    ) -> None:
        """Copy the KV of the tokens before ``end``, the last ones of the cache, to blocks.

        KV that a sliding layer has dropped becomes zeros. It is never read: a prefix is continued
        at the end of a chunk.

        blocks: uint8 [num_blocks, bytes_per_block].
        slots: blocks of the tokens, of which there are ``len(slots) * block_tokens``.
        """
        num_tokens, parts = len(slots) * self.block_tokens, []
        for piece in self.pieces:
            tensor = piece.of(cache)
            first = (tensor.shape[2] if piece.window else end) - num_tokens
            if first < 0:
                tensor, first = torch.nn.functional.pad(tensor, (0, 0, -first, 0)), 0
            parts.append(tensor.narrow(2, first, num_tokens))
        if len(slots) == 1:  # one call for all pieces: a model of 80 layers has 160
            block = blocks.narrow(0, slots[0], 1)
            torch._foreach_copy_([self._view(piece, block) for piece in self.pieces], parts)
            return
        where = torch.tensor(slots, device=blocks.device)
        for piece, part in zip(self.pieces, parts, strict=True):
            rows = part.reshape(piece.num_heads, len(slots), self.block_tokens, piece.dim)
            rows = rows.transpose(0, 1).to(blocks.device)
            self._view(piece, blocks).index_copy_(0, where, rows)

    def restore(self, cache: DynamicCache, blocks: torch.Tensor, slots: Sequence[int]) -> None:
        """Fill an empty cache with the KV of consecutive blocks, from the first on.

        For the arguments see ``save``.
        """
        self._make_layers(cache)
        where = torch.tensor(slots, device=blocks.device)
        num_tokens = len(slots) * self.block_tokens
        for piece in self.pieces:
            num = -(-min(piece.window or num_tokens, num_tokens) // self.block_tokens)
            rows = self._view(piece, blocks).index_select(0, where[len(slots) - num :])
            rows = rows.to(self._devices[piece.layer], non_blocking=True)
            joined = rows.transpose(0, 1).flatten(1, 2)
            if 0 < piece.window < joined.shape[1]:
                joined = joined[:, -piece.window :].contiguous()
            self._put(cache, piece, joined[None], num_tokens)

    def distances(self, found: torch.Tensor, recomputed: torch.Tensor) -> Distances:
        """Return the distances of the KV in some blocks from that in others, layer by layer.

        found, recomputed: uint8 [num_blocks, bytes_per_block].
        """

        def of_piece(piece: Piece) -> list[float]:
            views = (self._view(piece, blocks) for blocks in (found, recomputed))
            return token_distances(*(part.transpose(1, 2).flatten(0, 1) for part in views))

        by_layer = groupby(self.pieces, lambda piece: piece.layer)
        return stacked(map(of_piece, pieces) for _, pieces in by_layer)

    def join(self, cache: DynamicCache, rows: Sequence[DynamicCache], num_tokens: int) -> None:
        """Fill an empty cache with one row per cache of ``rows``, padded on the left by zeros.

        num_tokens: length of the rows, with padding. Padding is masked wherever it is used.
        """
        self._make_layers(cache)
        for piece in self.pieces:
            parts = [piece.of(row)[0] for row in rows]
            length = min(num_tokens, piece.window or num_tokens)
            shape = (len(rows), piece.num_heads, length, piece.dim)
            joined = torch.zeros(shape, dtype=piece.dtype, device=self._devices[piece.layer])
            for at, part in enumerate(parts):
                joined[at, :, length - part.shape[1] :] = part
            self._put(cache, piece, joined, num_tokens)
        for state in self.states:
            tensors = [getattr(row.layers[state.layer], state.name)[state.at] for row in rows]
            self._put_state(cache, state, torch.cat(tensors))

    # -- states ------------------------------------------------------------------------------------

    def save_states(self, cache: DynamicCache, blocks: torch.Tensor, slots: Sequence[int]) -> None:
        """Copy the state of the recurrent layers to the blocks of a snapshot."""
        if not slots:
            return
        snapshot = blocks.new_zeros(len(slots), blocks.shape[1])
        flat = snapshot.view(-1)
        for state in self.states:
            tensor = getattr(cache.layers[state.layer], state.name)[state.at]
            self._view_state(state, flat).copy_(tensor[0])
        blocks.index_copy_(0, torch.tensor(slots, device=blocks.device), snapshot)

    def restore_states(
        self, cache: DynamicCache, blocks: torch.Tensor, slots: Sequence[int]
    ) -> None:
        """Give an empty cache the state of a snapshot."""
        self._make_layers(cache)
        if not self.states:
            return
        where = torch.tensor(slots, device=blocks.device)
        flat = blocks.index_select(0, where).view(-1)
        for state in self.states:
            tensor = self._view_state(state, flat).to(self._devices[state.layer])
            self._put_state(cache, state, tensor[None])

    # -- layers ------------------------------------------------------------------------------------

    def _make_layers(self, cache: DynamicCache) -> None:
        while len(cache.layers) < len(self._devices):
            cache.layers.append(DynamicLayer())  # type: ignore[no-untyped-call]

    @staticmethod
    def _put(cache: DynamicCache, piece: Piece, tensor: torch.Tensor, num_tokens: int) -> None:
        """Set K or V of an empty layer. Its own ``update`` would copy the tensor once more."""
        layer: Any = cache.layers[piece.layer]
        if piece.name == INDEXER:
            layer.lazy_initialization_indexer(tensor)
            tensor = tensor[:, 0]
        elif not layer.is_initialized:
            layer.lazy_initialization(tensor, tensor)
        setattr(layer, piece.name, tensor)
        if isinstance(layer, SLIDING):
            layer.cumulative_length = num_tokens

    @staticmethod
    def _put_state(cache: DynamicCache, state: StatePiece, tensor: torch.Tensor) -> None:
        layer = cache.layers[state.layer]
        assert isinstance(layer, LinearAttentionLayer)
        if state.name == "conv_states":
            layer.lazy_initialization(conv_states=tensor, state_idx=state.at)
        else:
            layer.lazy_initialization(recurrent_states=tensor, state_idx=state.at)
        getattr(layer, state.name)[state.at].copy_(tensor)
        layer.has_previous_state[state.at] = True

    def _view(self, piece: Piece, blocks: torch.Tensor) -> torch.Tensor:
        """Return a piece of every block: [num_blocks, num_heads, block_tokens, dim]."""
        flat = blocks.narrow(1, piece.offset, piece.num_bytes).view(piece.dtype)
        return flat.view(len(blocks), piece.num_heads, self.block_tokens, piece.dim)

    @staticmethod
    def _view_state(state: StatePiece, flat: torch.Tensor) -> torch.Tensor:
        part = flat[state.offset : state.offset + state.num_bytes]
        return part.view(state.dtype).view(state.shape)


class _Row:
    """Places of pieces, one behind the other."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, size: int) -> int:
        """Return the offset of a new piece."""
        offset = self.num_bytes
        self.num_bytes += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        return offset


def _with_heads(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a layer's tensor with an axis of heads, which an indexer's keys lack."""
    return tensor[:, None] if name == INDEXER else tensor


def _is_empty(layer: object) -> bool:
    if isinstance(layer, LinearAttentionLayer) and any(layer.has_previous_state.values()):
        return False
    return not isinstance(layer, DynamicLayer) or layer.get_seq_length() == 0


# -- models in float32 ---------------------------------------------------------------------------


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute in float32 for a while. Its own tensors are put back unchanged.

    In 16 bits rounding is as large as the differences of a model that does not continue its own
    cache. If a copy of all weights does not fit into memory, each layer has one while it runs.

    Raises ``NoFloat32Error`` if it can't: weights in other forms than plain tensors, no memory.
    """
    _refuse_other_forms(model, [*model.parameters(), *model.buffers()])
    halves, layers = _Halves([*model.modules()]), list[_Halves]()
    try:
        _refuse_large(halves.tensors)
    except NoFloat32Error:
        modules = [*_repeated(model)]
        layers = [_Halves([*module.modules()]) for module in modules]
        within = {id(module) for top in modules for module in top.modules()}
        halves = _Halves([module for module in model.modules() if id(module) not in within])
        largest = max(layers, key=lambda layer: layer.num_bytes, default=halves)
        _refuse_large([*halves.tensors, *largest.tensors])
    with ExitStack() as stack:
        for layer, module in zip(layers, modules if layers else (), strict=True):
            before = module.register_forward_pre_hook(layer.widen)
            after = module.register_forward_hook(layer.put_back, always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        stack.callback(halves.put_back)
        halves.widen()
        if model.dtype is not torch.float32:
            raise NoFloat32Error(
                "its dtype is read from a layer, which is in float32 only while it runs"
            )
        yield


class _Halves:
    """Parameters and buffers of some modules in 16 bits, which have copies in float32 for a while.

    The modules are given other tensors: data of inference tensors can't be exchanged.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._places = [
            (module, name, tensor)
            for module in modules
            for name, tensor in (
                *module.named_parameters(recurse=False, remove_duplicate=False),
                *module.named_buffers(recurse=False, remove_duplicate=False),
            )
            if tensor.dtype in HALVES
        ]
        self.tensors = [*{id(tensor): tensor for *_, tensor in self._places}.values()]
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors)

    def widen(self, *_: object) -> None:
        wide = {id(tensor): tensor.detach().float() for tensor in self.tensors}
        for module, name, tensor in self._places:
            is_weight = isinstance(tensor, torch.nn.Parameter)
            new = wide[id(tensor)]
            setattr(
                module, name, torch.nn.Parameter(new, requires_grad=False) if is_weight else new
            )

    def put_back(self, *_: object) -> None:
        for module, name, tensor in self._places:
            setattr(module, name, tensor)


def _repeated(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a model's layers: the elements of each outermost list of modules."""
    for child in module.children():
        yield from child if isinstance(child, torch.nn.ModuleList) else _repeated(child)


def _refuse_other_forms(model: PreTrainedModel, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            raise NoFloat32Error(f"its weights are of class {type(tensor).__name__}")
        if tensor.is_meta:
            raise NoFloat32Error("not all of its weights are in memory")
    if any(not weight.is_floating_point() for weight in model.parameters()):
        raise NoFloat32Error("its weights are quantised")


def _refuse_large(halves: list[torch.Tensor]) -> None:
    """Raise ``NoFloat32Error`` if a copy in float32 does not fit beside the tensors."""
    for kind in {tensor.device.type for tensor in halves}:
        num_bytes = sum(2 * tensor.nbytes for tensor in halves if tensor.device.type == kind)
        if kind == "cpu":
            left = available_bytes()[0]
        elif kind == "cuda":
            devices = {tensor.device for tensor in halves if tensor.device.type == kind}
            left = sum(torch.cuda.mem_get_info(device)[0] for device in devices)
        else:
            continue  # the device's allocator refuses
        if num_bytes + RESERVE_BYTES > left:
            raise NoFloat32Error(
                f"its weights take {num_bytes / 2**30:.1f} GiB in float32, and "
                f"{left / 2**30:.1f} GiB are left"
            )
