"""Runs the model: one chunk of one prompt, or one token of many requests."""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from kvtier.cache.audit import Distances
from kvtier.cache.lease import Lease
from kvtier.cache.tokens import Cache
from kvtier.cache.transfer import LayerGate
from kvtier.connectors.transformers.cache_layers import cache_argument
from kvtier.core.config import CHUNK_TOKENS, CacheConfig
from kvtier.core.types import Slot
from kvtier.devices import Device
from kvtier.observe.block_events import BlockLog
from kvtier.serve.engine.batch import BatchKV
from kvtier.serve.engine.config import EngineInfo
from kvtier.serve.engine.paged import PagedKV, PromptKV, Span
from kvtier.serve.engine.pool import KVPool

Keep = int | Sequence[int]
"""Tokens of a forward whose logits are returned: how many last ones, or their places."""

WARM_UP_TOKENS = 4096
"""Longest context of the warm-up."""

COMMIT_CHUNKS = 8
"""Chunks of a prompt that are committed together. They are not needed before its prefill ends, but
the stores of a very long prompt should begin earlier."""


class Runner(ABC):
    """Forwards of one model over the blocks of the device tier, which it allocates.

    A prefill chunk always runs alone, so its KV depends only on its prompt and its place on the
    grid, never on other requests.

    commit_chunks: chunks of a prompt that are committed together.
    num_scratch: blocks that ``recompute`` writes.
    has_first_layer: whether the first layer of ``distances`` is the model's first one.
    """

    commit_chunks = COMMIT_CHUNKS
    num_scratch: int
    has_first_layer = True

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """The content of a block: equal if blocks can be exchanged."""

    @abstractmethod
    def open_cache(self, config: CacheConfig, device: Device, events: BlockLog | None) -> Cache:
        """Return the cache of the blocks; see ``Cache`` for the arguments."""

    @abstractmethod
    def span(self, lease: Lease, start: int, end: int) -> Span:
        """Return tokens ``start .. end`` of a request. The lease is ready, or followed."""

    @abstractmethod
    def prefill_tail(
        self, token_ids: Sequence[int], span: Span, keep: Keep, gate: LayerGate | None = None
    ) -> torch.Tensor:
        """Compute the KV of a prompt's tokens ``span.start .. span.end``.

        token_ids: those tokens.
        keep: tokens whose logits are returned.
        gate: of the loads of earlier tokens. The call returns when these have ended, and raises the
        gate's ``DeviceError`` if they take too long.
        Returns logits: float32 [num_kept, vocab_size], CPU.
        """

    @abstractmethod
    def decode(self, token_ids: Sequence[int], spans: Sequence[Span]) -> torch.Tensor:
        """Compute one more token for each sequence.

        Returns logits: float32 [num_sequences, vocab_size], on the model's device.
        """

    @abstractmethod
    def recompute(
        self,
        token_ids: Sequence[int],
        lease: Lease,
        start: int,
        scratch: Sequence[Slot],
        states: Callable[[int], Sequence[Slot] | None],
    ) -> Distances:
        """Compute a chunk again, after the cached KV before it, and return how far its own is.

        Args:
            token_ids: tokens of the chunk.
            lease: has the KV of the chunk, and of the tokens before it; it is ready.
            start: the chunk's first token.
            scratch: ``num_scratch`` slots, which are overwritten.
            states: return the slots of the state after a number of blocks, None if it is not on the
                device. That before the chunk is.
        """

    @abstractmethod
    def distances(self, found: Sequence[Slot], recomputed: Sequence[Slot]) -> Distances:
        """Return the distances of the KV in some slots from that in others, layer by layer."""

    @abstractmethod
    def rehearse(
        self, prompt: Sequence[int], kept: Sequence[int], batches: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Compute a prompt on the grid, and decode steps. The pool's blocks may be overwritten.

        kept: positions of the prompt's tokens whose logits are returned, ascending.
        batches: lengths of the sequences of a decode step, whose last token is decoded after the
        others.
        Returns logits of the chunks, and of the decode steps: float32 [num_tokens, vocab_size].
        """

    def warm_up(self, info: EngineInfo, observe: Callable[[int, int, float], None]) -> None:
        """Run the model, and pass measured prefill times to ``observe``.

        It measures a whole chunk, a short one, and one after a long context. The pool is empty, so
        it may overwrite any blocks.

        observe: takes the tokens before, those computed, and seconds.
        """
        chunk = min(info.chunk_tokens, info.max_model_tokens - 1)
        most = min(WARM_UP_TOKENS, info.max_model_tokens - 1)
        far = (most - chunk) // self.block_size * self.block_size
        self._timed_prefill(0, chunk)  # pays the one-time costs
        for first, num_tokens in ((0, chunk), (0, max(1, chunk // 4)), (far, chunk)):
            compute = partial(self._timed_prefill, first, num_tokens)
            observe(first, num_tokens, least_seconds(compute))

    @abstractmethod
    def _timed_prefill(self, first: int, num_tokens: int) -> float:
        """Compute tokens after ``first`` others, of any content, and return the seconds."""


class ModelRunner(Runner):
    """Forwards over the paged pool. Attention reads the blocks of the device tier.

    Decoding batches requests; the batch size changes the rounding of logits.

    chunk_tokens: the prefill grid.
    """

    def __init__(
        self, model: PreTrainedModel, pool: KVPool, chunk_tokens: int = CHUNK_TOKENS
    ) -> None:
        self._model = model
        self._pool = pool
        self._chunk_tokens = chunk_tokens
        self.num_scratch = chunk_tokens // pool.group.block_size
        self._device = model.device
        self._cache_name = cache_argument(model.forward)

    @property
    def block_size(self) -> int:
        return self._pool.group.block_size

    @property
    def fingerprint(self) -> str:
        return self._pool.group.fingerprint

    def open_cache(self, config: CacheConfig, device: Device, events: BlockLog | None) -> Cache:
        return Cache(config, device, self._pool.tier(), events=events, names_codec=True)

    def span(self, lease: Lease, start: int, end: int) -> Span:
        return Span(lease.slots, start, end)

    def prefill(
        self, token_ids: Sequence[int], span: Span, gate: LayerGate | None = None
    ) -> torch.Tensor:
        """Do the same as ``prefill_tail``, and return the logits of the last token."""
        return self.prefill_tail(token_ids, span, 1, gate)[-1]

    @torch.inference_mode()
    def prefill_tail(
        self, token_ids: Sequence[int], span: Span, keep: Keep, gate: LayerGate | None = None
    ) -> torch.Tensor:
        positions = torch.arange(span.start, span.end)
        kv = PromptKV(self._pool, span, gate)
        logits = self._forward(torch.tensor(token_ids), positions, kv, keep)
        if gate is not None:
            gate.wait()  # first: waiting for the device has no time limit
        return logits.float().cpu()

    def recompute(
        self,
        token_ids: Sequence[int],
        lease: Lease,
        start: int,
        scratch: Sequence[Slot],
        states: Callable[[int], Sequence[Slot] | None],
    ) -> Distances:
        first = start // self.block_size
        span = Span([*lease.slots[:first], *scratch], start, start + len(token_ids))
        self.prefill_tail(token_ids, span, keep=1)
        return self.distances(lease.slots[first : first + len(scratch)], scratch)

    def distances(self, found: Sequence[Slot], recomputed: Sequence[Slot]) -> Distances:
        return self._pool.distances(found, recomputed)

    @torch.inference_mode()
    def decode(self, token_ids: Sequence[int], spans: Sequence[Span]) -> torch.Tensor:
        order = sorted(range(len(spans)), key=lambda at: spans[at].end)
        is_sorted = order == list(range(len(spans)))
        ordered = [spans[at] for at in order]
        logits = self._forward(
            torch.tensor([token_ids[at] for at in order]),
            torch.tensor([span.start for span in ordered]),
            BatchKV(self._pool, ordered),
            keep=0,
        ).float()
        if is_sorted:
            return logits
        return logits.index_select(0, torch.tensor(order, device=logits.device).argsort())

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: PagedKV, keep: Keep
    ) -> torch.Tensor:
        """Return the logits of some tokens of the row; ``keep`` of 0 keeps all."""
        return kept_logits(
            self._model,
            keep,
            input_ids=token_ids[None].to(self._device),
            position_ids=positions[None].to(self._device),
            use_cache=True,
            kv=kv,
            **{self._cache_name: kv},
        )

    # -- at load -----------------------------------------------------------------------------------

    def rehearse(
        self, prompt: Sequence[int], kept: Sequence[int], batches: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        span = self._first_blocks(len(prompt))
        chunks, steps = list[torch.Tensor](), dict[tuple[int, int], torch.Tensor]()
        for start in range(0, len(prompt), self._chunk_tokens):
            end = min(start + self._chunk_tokens, len(prompt))
            places = places_in(kept, start, end)
            chunks.append(self.prefill_tail(prompt[start:end], span(start, end), places))
            # Now: a ring has what the window of the next token reaches only for a while.
            for number, batch in enumerate(batches):
                ends = [length for length in batch if start < length <= end]
                if ends:
                    spans = [span(length - 1, length) for length in ends]
                    rows = self.decode([prompt[length - 1] for length in ends], spans).cpu()
                    steps.update(zip([(number, length) for length in ends], rows, strict=True))
        decoded = [
            steps[number, length] for number, batch in enumerate(batches) for length in batch
        ]
        return torch.cat([*chunks, torch.stack(decoded)])

    def warm_up(self, info: EngineInfo, observe: Callable[[int, int, float], None]) -> None:
        super().warm_up(info, observe)
        chunk = min(info.chunk_tokens, info.max_model_tokens - 1)
        self.decode([0], [self._first_blocks(chunk + 1)(chunk, chunk + 1)])

    def _timed_prefill(self, first: int, num_tokens: int) -> float:
        span = self._first_blocks(first + num_tokens)(first, first + num_tokens)
        began = time.perf_counter()
        self.prefill([0] * num_tokens, span)
        return time.perf_counter() - began

    def _first_blocks(self, num_tokens: int) -> Callable[[int, int], Span]:
        """Return the spans of a sequence that has the pool's first blocks, by start and end."""
        return partial(Span, [Slot(slot) for slot in range(-(-num_tokens // self.block_size))])


def kept_logits(model: PreTrainedModel, keep: Keep, **options: Any) -> torch.Tensor:
    """Call a model with a row of tokens; return the logits of some: [num_kept, vocab_size]."""
    at = keep if isinstance(keep, int) else torch.tensor(keep, device=model.device)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits: torch.Tensor = model(logits_to_keep=at, **options).logits[0]
        return logits[-at:] if isinstance(at, int) else logits
    logits = model(**options).logits[0]
    return logits[-at:] if isinstance(at, int) else logits[at]


def places_in(positions: Sequence[int], start: int, end: int) -> list[int]:
    """Return the places in ``start .. end`` of those positions that lie in it."""
    return [position - start for position in positions if start <= position < end]


def least_seconds(work: Callable[[], float]) -> float:
    """Return the least time of a few runs of ``work``, which returns its seconds.

    The first run counts only if it takes so long that another would take too long.
    """
    times: list[float] = []
    while len(times) < 5 and (len(times) < 2 or sum(times) < 0.3) and sum(times) < 3:
        times.append(work())
    return min(times)
