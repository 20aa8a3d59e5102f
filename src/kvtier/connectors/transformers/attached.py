"""A model that is attached, and the wrapper around its ``forward``.

A cache object never sees token ids, so ``forward`` is wrapped: a call that begins prompts computes
them on a grid of chunks, and restores the chunks that are known.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

import kvtier
from kvtier.cache.audit import Auditor
from kvtier.cache.shared import SharedCache
from kvtier.cache.states import SNAPSHOT_TOKENS
from kvtier.connectors.transformers.cache_layers import (
    CACHE_FIELD,
    CacheLayers,
    UnsupportedModelError,
)
from kvtier.connectors.transformers.grid import BlockMemory, ChunkGrid, Forward, TokenSources
from kvtier.connectors.transformers.prompts import PromptBatch, PromptReader, odd_state
from kvtier.connectors.transformers.versions import warn_of_untested
from kvtier.connectors.transformers.weights_in_memory import WeightsInMemory
from kvtier.core.config import CacheConfig
from kvtier.core.errors import CacheError, UsageError
from kvtier.core.keys import Namespace
from kvtier.identity import Basis, Identity

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttachedStats:
    """Counts of an attached model since it was attached.

    Attributes:
        refused: why nothing of this model is reused; "" if it is.
        num_prompts: prompts that were computed on the grid.
        num_prompt_tokens: their tokens.
        reused_tokens: tokens of prompts whose KV was restored, by tier: "host", "disk", ...
        num_kept_tokens: generated tokens whose KV was kept.
        num_without_room: prompts that were computed without the cache, for want of room.
        audits: prompts with restored KV that were audited, by outcome.
        passed: calls into an empty cache that were passed through, by reason.
        weights: "read", "unknown" (only this process finds its KV), or "being read"; as of the
            last prompt.
        bytes_per_token: bytes of KV per token.
        bytes_per_snapshot: bytes of a snapshot of the model's recurrent state; 0 without any.
    """

    refused: str = ""
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    reused_tokens: Mapping[str, int] = field(default_factory=dict)
    num_kept_tokens: int = 0
    num_without_room: int = 0
    audits: Mapping[str, int] = field(default_factory=dict)
    passed: Mapping[str, int] = field(default_factory=dict)
    weights: str = ""
    bytes_per_token: int = 0
    bytes_per_snapshot: int = 0

    @property
    def num_reused_tokens(self) -> int:
        """Tokens of prompts that were not computed."""
        return sum(self.reused_tokens.values())


@dataclass(slots=True)
class _Sequence:
    """The tokens whose KV is in a cache object, to keep what is generated.

    new: ids that were not read yet: reading them waits for a device.
    num_kept: tokens of whole chunks that are in the cache, or not worth another try.
    """

    tokens: list[int]
    new: list[torch.Tensor]
    num_kept: int

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + sum(ids.shape[1] for ids in self.new)

    def cut(self, num_tokens: int) -> None:
        """Forget the tokens behind ``num_tokens``: candidates that were not accepted."""
        self.read()
        del self.tokens[num_tokens:]

    def read(self) -> list[int]:
        for ids in self.new:
            self.tokens += ids[0].tolist()
        self.new.clear()
        return self.tokens


class _Forward:
    """A model's ``forward`` while it is attached.

    ``generate`` inspects the signature, which ``functools.update_wrapper`` keeps. A deep copy of
    the model has its own plain ``forward`` again.
    """

    def __init__(self, attached: Attached, inner: Forward) -> None:
        self._attached = attached
        functools.update_wrapper(self, inner)

    def __call__(self, *positional: object, **named: Any) -> Any:
        return self._attached.forward(*positional, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        model = self._attached.model
        copied = memo.get(id(model), model)
        plain: Forward = type(model).forward.__get__(copied)
        return plain

    def __reduce__(self) -> str:
        raise UsageError("an attached model can't be pickled; detach it, or save its state_dict")


class Attached:
    """A model whose prompts reuse the KV of earlier ones. See ``attach``."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: CacheConfig,
        capacity_bytes: int,
        chunk_tokens: int,
        keep_generated: bool,
        salt: str,
        audit: float,
    ) -> None:
        warn_of_untested()
        self.model = model
        self.chunk_tokens = chunk_tokens
        self._had_own_forward = "forward" in vars(model)
        self._inner: Forward = model.forward
        self._keep_generated = keep_generated
        self._salt = salt
        self._lock = threading.Lock()
        self._refused = ""
        self._counts: Counter[str] = Counter()  # by their names in AttachedStats
        self._passed: Counter[str] = Counter()
        self._reuse = TokenSources()
        self._named: Identity | None = None
        self._sequences: weakref.WeakKeyDictionary[DynamicCache, _Sequence] = (
            weakref.WeakKeyDictionary()
        )
        self._cache: SharedCache | None = None
        model.kvtier = self  # type: ignore[assignment]
        try:
            self._reader = PromptReader(model, self._inner)
            self._layers = CacheLayers(model, chunk_tokens)
            self._layers.refuse_broken(model)
            memory = BlockMemory(self._layers, capacity_bytes, config)
        except UnsupportedModelError as reason:
            logger.warning("KV of this model is not reused, because %s", reason)
            self._refused = str(reason)
            return
        except BaseException:
            del model.kvtier
            raise
        self._cache = memory.cache
        self._keep_tokens = chunk_tokens  # each time, a snapshot is made, too
        if self._layers.states:
            self._keep_tokens *= max(1, SNAPSHOT_TOKENS // chunk_tokens)
        self._auditor = Auditor(audit, memory.cache.call(lambda cache: cache.metrics))
        self._grid = ChunkGrid(
            self._inner, self._reader.takes_positions, self._layers, memory, self._auditor
        )
        self._weights = WeightsInMemory(model, self._inner)
        model.forward = _Forward(self, self._inner)
        # A model that is not needed any more ends its cache. Not in this thread: it may be any.
        self._finalizer = weakref.finalize(model, _close_later, memory.cache)
        self._finalizer.atexit = False  # the cache closes itself then

    # -- for callers -------------------------------------------------------------------------------

    def stats(self) -> AttachedStats:
        """Return the counts until now."""
        if self._cache is None:
            return AttachedStats(self._refused)
        if self._weights.basis == "being read":
            self._weights.current()
        with self._lock:
            stats = AttachedStats(
                reused_tokens=dict(self._reuse.tiers),
                num_without_room=self._reuse.num_without_room,
                audits=dict(self._reuse.audits),
                passed=dict(self._passed),
                weights=self._weights.basis,
                bytes_per_token=self._layers.group.bytes_per_block // self.chunk_tokens,
                bytes_per_snapshot=self._layers.bytes_per_snapshot,
            )
            counts: Any = self._counts
            return replace(stats, **counts)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until all KV that is due is on disk. Return False after ``timeout_s``.

        It gets there without this call, too, and before the process ends.
        """
        if self._cache is None or getattr(self.model, "kvtier", None) is not self:
            return True  # detaching has done it
        return self._cache.flush(timeout_s)

    def detach(self) -> None:
        """Give the model its own ``forward`` back, and close the cache. Safe to call twice."""
        if getattr(self.model, "kvtier", None) is not self:
            return
        del self.model.kvtier
        if self._cache is None:
            return
        if self._had_own_forward:
            self.model.forward = self._inner
        else:
            del self.model.forward
        self._finalizer.detach()
        self._weights.wait()
        self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of the model is not attached."""

    def __reduce__(self) -> str:
        raise UsageError("an attached model can't be pickled; detach it, or save its state_dict")

    # -- calls of the model ------------------------------------------------------------------------

    def forward(self, *positional: object, **named: Any) -> Any:
        """Call the model's own ``forward``, except for prompts: those are computed on the grid."""
        call = self._reader.named(positional, named)
        ids, cache = call.get("input_ids"), call.get(self._reader.cache_name)
        if isinstance(cache, transformers.Cache) and cache.get_seq_length():
            output = self._inner(*positional, **named)
            self._follow(cache, ids)
            return output
        prompts = self._reader.read(self.model, self._layers, call)
        if isinstance(prompts, str):
            return self._pass(prompts, positional, named)
        if sum(map(len, prompts.rows)) < len(prompts.rows) * self.chunk_tokens:
            output = self._pass("prompts shorter than a chunk", positional, named)
        else:
            identity = self._weights.current() if self._is_usable else None
            if isinstance(identity, str):
                return self._pass(identity, positional, named)
            output = self._prefill(prompts, identity)
        self._begin_sequence(prompts, output)
        return output

    def _pass(self, reason: str, positional: tuple[object, ...], named: dict[str, Any]) -> Any:
        """Count a call that is not kvtier's, and make it."""
        with self._lock:
            self._passed[reason] += 1
        return self._inner(*positional, **named)

    @property
    def _is_usable(self) -> bool:
        return self._cache is not None and self._cache.is_usable

    def _prefill(self, prompts: PromptBatch, identity: Identity | None) -> CausalLMOutputWithPast:
        namespace = None if identity is None else self._namespace(identity)
        reuse = TokenSources()
        output = self._grid.prefill(prompts, namespace, reuse)
        with self._lock:
            self._counts["num_prompts"] += len(prompts.rows)
            self._counts["num_prompt_tokens"] += sum(map(len, prompts.rows))
            self._reuse.add(reuse)
        return output

    def _namespace(self, identity: Identity) -> bytes | None:
        """Return the digest of all that decides on the bits of KV, besides tokens.

        None if audits have found that KV kept by this process is wrong.
        """
        if identity != self._named:
            assert self._cache is not None
            # Nobody could find the blocks of weights that only this process knows.
            is_known = identity.basis is not Basis.UNKNOWN
            self._cache.call(lambda cache: cache.let_archive(is_known))
            self._named = identity
        namespace = Namespace(
            identity.digest,
            _made_by(self.model),
            str(self.model.dtype),
            self._layers.fingerprint,
            self.chunk_tokens,
            salt=self._salt,
        ).digest
        name = self._auditor.quarantine.names(namespace)[-1]
        return None if self._auditor.quarantine.is_closed(name) else name

    # -- generated tokens --------------------------------------------------------------------------

    def _begin_sequence(self, prompts: PromptBatch, output: CausalLMOutputWithPast) -> None:
        """Note the tokens whose KV is in the output's cache, if what follows them is to be kept."""
        cache = getattr(output, CACHE_FIELD)
        if not self._keep_generated or type(cache) is not DynamicCache:
            return
        if prompts.images is not None:
            return  # what follows would be computed with their positions
        if len(prompts.rows) == 1 and len(prompts.rows[0]) == prompts.num_tokens:
            [tokens] = prompts.rows
            num_kept = len(tokens) // self.chunk_tokens * self.chunk_tokens
            self._sequences[cache] = _Sequence(tokens, [], num_kept)

    def _follow(self, cache: transformers.Cache, ids: object) -> None:
        """Note the tokens that a call has added to a cache, and keep each whole chunk."""
        sequence = self._sequences.get(cache) if type(cache) is DynamicCache else None
        if sequence is None:
            return
        assert isinstance(cache, DynamicCache)
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or len(ids) != 1:
            del self._sequences[cache]  # no ids, or the sequence became several
            return
        num_before = cache.get_seq_length() - ids.shape[1]
        if num_before > sequence.num_tokens or ids.shape[1] >= self.chunk_tokens:
            del self._sequences[cache]
            return
        if num_before < sequence.num_tokens:
            sequence.cut(num_before)
        sequence.new.append(ids)
        if sequence.num_tokens >= sequence.num_kept + self._keep_tokens:
            self._keep(sequence, ids.device)

    def _keep(self, sequence: _Sequence, device: torch.device) -> None:
        """Compute whole chunks of generated tokens on the grid, so that they have its bits."""
        num_tokens = sequence.num_tokens // self.chunk_tokens * self.chunk_tokens
        sequence.num_kept = num_tokens
        if not self._is_usable or odd_state(self.model):
            return
        # Only token ids are taken from what was computed: the model may have changed since.
        identity = self._weights.current()
        if not isinstance(identity, Identity):
            return
        namespace = self._namespace(identity)
        if namespace is None:
            return
        tokens = sequence.read()[:num_tokens]
        try:
            num_new = self._grid.keep(tokens, namespace, device)
        except (CacheError, RuntimeError) as error:  # torch: no memory, for instance
            logger.warning("generated tokens are not kept: %s", error)
            return
        with self._lock:
            self._counts["num_kept_tokens"] += num_new


def _made_by(model: PreTrainedModel) -> str:
    """Return the versions, the device and the settings of torch, on which rounding may depend."""
    device = model.device
    kind = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    return (
        f"kvtier {kvtier.__version__} transformers {transformers.__version__} "
        f"torch {torch.__version__} {torch.get_float32_matmul_precision()} {device.type} {kind}"
    )


def _close_later(cache: SharedCache) -> None:
    """Close a cache on a thread of its own."""
    threading.Thread(target=cache.close, name="kvtier-close").start()
