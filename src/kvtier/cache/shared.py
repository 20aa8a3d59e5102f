"""A cache for programs without a loop of their own: any thread may call it, and it polls itself.

kv = torch.zeros(num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
config = kvtier.CacheConfig(host_capacity="8GiB", disk_path="/nvme/kv")
cache = kvtier.open_cache(kv, "my-model", config)

prompt = cache.prompt(tokens)
lease = cache.fetch(prompt)         waits for the copies
...                                 compute what is behind lease.num_shared, into lease.slots
cache.finish(lease)
cache.stored(prompt).result()       only to wait until it is stored
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Condition, Thread
from types import TracebackType
from typing import Protocol, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvtier.cache.ladder import Prefetch
from kvtier.cache.lease import Lease
from kvtier.cache.states import SnapshotCache
from kvtier.cache.tokens import Cache
from kvtier.core.config import CacheConfig
from kvtier.core.errors import Closed, LayoutError, UsageError
from kvtier.core.keys import Namespace, token_labels
from kvtier.core.system.process import OwnerProcess
from kvtier.core.types import DEVICE, Label
from kvtier.devices import Memory, find_device
from kvtier.layout import DType, KVGroup, full_attention, named_layout
from kvtier.tiers import DeviceTier

POLL_S = 0.0005
"""Time between two polls of a ``SharedCache`` while somebody waits for a copy."""
BUSY_POLL_S = 0.005
"""Time between two polls while copies are in flight and no thread waits for them."""
IDLE_POLL_S = 0.5
"""Time between two polls while nothing is in flight: upkeep, such as verification of a disk."""

T = TypeVar("T")


class DeviceTensor(Protocol):
    """The part of ``torch.Tensor`` that a pool needs."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> object: ...
    @property
    def device(self) -> object: ...
    def data_ptr(self) -> int:
        """Return the address of the first element."""

    def is_contiguous(self) -> bool:
        """Whether there are no gaps between the elements."""


def open_cache(
    kv: npt.NDArray[np.generic] | DeviceTensor,
    model: str,
    config: CacheConfig | None = None,
    *,
    group: KVGroup | None = None,
    layout: str = "layer_first",
    blocks_per_snapshot: int = 0,
) -> SharedCache:
    """Open a cache over an engine's KV memory, and over the tiers below it.

    Shapes, dtype and device are those of ``kv``. Without another ``group`` it is
    ``[num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]``: ``kv[layer, 0]`` are the
    keys of a layer, ``kv[layer, 1]`` its values.

    Args:
        kv: a contiguous numpy array, or a contiguous tensor on any device of torch. Leases name
            blocks in it. It belongs to the engine, and is not copied.
        model: everything that decides on the bits of KV besides tokens: the model, its revision and
            quantisation, the engine and its version. KV on disk is found under equal names only. ""
            if the caller makes each ``Prompt`` itself, with a namespace of its own.
        config: the tiers below ``kv``, and all other settings.
        group: content of a block, if it is not keys and values of one shape: ``latent_attention``
            for MLA, ``opaque`` for blocks of bytes. ``kv`` may then have any shape.
        layout: order of ``kv`` with a ``group``: ``layer_first`` is the order above,
            ``block_first`` has whole blocks one after the other.
        blocks_per_snapshot: blocks that a snapshot of recurrent layers takes; see
            ``SnapshotCache``.

    Raises:
        LayoutError: ``kv`` has another shape, another dtype, or gaps.
        ConfigError: the settings are not possible.
        DeviceError: no back end can copy on the device of ``kv``.
    """
    config, group = config or CacheConfig(), group or _group_of(kv)
    memory = _memory_of(kv)
    num_blocks = memory.nbytes // group.bytes_per_block
    tier = DeviceTier(memory, named_layout(layout, group, num_blocks))
    device = find_device("cpu" if isinstance(kv, np.ndarray) else str(kv.device))
    cache = (
        SnapshotCache(config, device, tier, blocks_per_snapshot=blocks_per_snapshot)
        if blocks_per_snapshot
        else Cache(config, device, tier)
    )
    named = Namespace(model, "", str(group.dtype), group.fingerprint, group.block_size)
    return SharedCache(cache, named if model else None)


def _group_of(kv: npt.NDArray[np.generic] | DeviceTensor) -> KVGroup:
    """Return the group of keys and values with the shape of ``kv``."""
    shape = tuple(kv.shape)
    if len(shape) != 6 or shape[1] != 2:
        raise LayoutError(
            f"kv has the shape {shape}, not [num_layers, 2, num_blocks, block_size, num_kv_heads, "
            "head_dim]; reshape it, or say by group= what a block is"
        )
    name = str(kv.dtype).removeprefix("torch.")
    dtype = "float8" if name.startswith("float8") else name
    num_layers, _, _, block_size, num_kv_heads, head_dim = shape
    # An unknown name is the group's to refuse.
    return full_attention(num_layers, num_kv_heads, head_dim, cast("DType", dtype), block_size)


def _memory_of(kv: npt.NDArray[np.generic] | DeviceTensor) -> Memory:
    """Return the memory of an array or tensor."""
    if isinstance(kv, np.ndarray):
        is_whole, kind, address = kv.flags.c_contiguous, "host", kv.ctypes.data
        if not kv.flags.writeable:
            raise LayoutError("kv is read-only; give an array that loads can be written to")
    else:
        is_whole, address = kv.is_contiguous(), kv.data_ptr()
        kind = str(kv.device).partition(":")[0]
    if not is_whole:
        raise LayoutError(f"kv of the shape {tuple(kv.shape)} has gaps; make it contiguous")
    return Memory(address, kv.nbytes, kind, kv)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, as the methods of a ``SharedCache`` take it.

    Attributes:
        namespace: digest of all that decides on the bits of KV besides tokens.
        labels: its full blocks.
        num_tokens: its tokens.
    """

    namespace: bytes
    labels: Sequence[Label]
    num_tokens: int


class QueuedPrompt:
    """A prompt whose blocks are read ahead until ``end``. See ``SharedCache.prefetch``."""

    def __init__(self, cache: SharedCache, prompt: Prompt) -> None:
        self.prompt = prompt
        self.begun: Prefetch | None = None
        self._cache = cache

    @property
    def ready(self) -> bool:
        """Whether everything that is read ahead has arrived."""
        return self.begun is not None and self.begun.ready

    def end(self) -> None:
        """End the prefetch: the request has its lease, or was aborted. Safe to call twice."""
        self._cache.end_prefetch(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


class SharedCache:
    """A cache that all threads of a process share, and that needs no ``poll``.

    A thread notices the ends of copies, reads ahead, and writes what is due to storage, so computed
    blocks become durable while no request runs. ``call`` reaches the other methods of the cache.

    Args:
        cache: the cache. Only this object calls it from now on, and closes it.
        namespace: that of ``prompt``; None if the caller makes each ``Prompt`` itself.
    """

    def __init__(self, cache: Cache, namespace: Namespace | None = None) -> None:
        self._cache = cache
        self._namespace = namespace
        self._condition = Condition()
        self._process = OwnerProcess()
        self._closed = False
        self._queued: dict[QueuedPrompt, None] = {}  # in order of arrival
        self._awaited: deque[tuple[Future[int], Prompt]] = deque()
        self._thread = Thread(target=self._keep_polling, name="kvtier-progress", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # before the threads that copy end with the interpreter

    @property
    def is_usable(self) -> bool:
        """Whether it is open, and this is not a forked child of its process."""
        return not self._closed and self._process.is_here

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._cache.group.block_size

    # -- the life of a request --------------------------------------------------------------------

    def prompt(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        *,
        adapter: str = "",
        salt: str = "",
    ) -> Prompt:
        """Return the prompt of these tokens.

        Args:
            tokens: integers in 0 .. 2**32 - 1; they are copied.
            adapter: LoRA or other adapter that changes the KV; "" for none.
            salt: separates tenants: prompts share KV only under equal salts.
        """
        if self._namespace is None:
            raise UsageError("the cache was opened without a model; name it, or make each Prompt")
        named = replace(self._namespace, adapter=adapter, salt=salt)
        return Prompt(named.digest, token_labels(tokens, self.block_size), len(tokens))

    def prefetch(self, prompt: Prompt) -> QueuedPrompt:
        """Read a queued request's blocks from storage into host memory, in the background.

        Until ``end`` of the result, or the end of its ``with``, these blocks stay there, and those
        on the device are evicted last. ``fetch`` the prompt before that. Requests are read ahead in
        the order of these calls, as far as there is room; without host memory nothing is.
        """
        queued = QueuedPrompt(self, prompt)
        with self._open() as cache:
            cache.wait(prompt.namespace, prompt.labels, True)
            self._queued[queued] = None
            self._begin_prefetches()
            self._condition.notify_all()
        return queued

    def end_prefetch(self, queued: QueuedPrompt) -> None:
        """Do the same as ``queued.end()``. It does nothing after ``close``."""
        self._process.must_be_here("the cache")
        with self._condition:
            if self._closed or queued not in self._queued:
                return
            del self._queued[queued]
            self._cache.wait(queued.prompt.namespace, queued.prompt.labels, False)
            if queued.begun is not None:
                self._cache.end_prefetch(queued.begun)

    def fetch(self, prompt: Prompt, num_tokens: int = 0, *, wait_s: float = 0.0) -> Lease | None:
        """Reuse the cached prefix of a prompt, reserve slots for the rest, and wait for the copies.

        Blocks that could not be loaded are among those to compute.

        Args:
            prompt: the prompt.
            num_tokens: tokens that the request needs room for, its output included; at least those
                of the prompt.
            wait_s: longest wait for other requests to end, if there is no room.

        Returns:
            A lease that is ready: the KV of its first ``num_shared`` blocks is in ``slots``. None
            if there is no room; at once for a request that is larger than the pool.

        Raises:
            Closed: after ``close``, and in a forked child.
        """
        with self._open() as cache:
            num_blocks = -(-max(num_tokens, prompt.num_tokens) // self.block_size)
            if num_blocks > cache.num_slots()[DEVICE]:
                return None
            ends = time.monotonic() + cache.config.lookup_deadline_s
            while cache.lookup(prompt.namespace, prompt.labels) and time.monotonic() < ends:
                self._wait(POLL_S)
            ends, loads = time.monotonic() + wait_s, True
            while True:
                lease = cache.fetch(
                    prompt.namespace, prompt.labels, prompt.num_tokens, num_blocks, load=loads
                )
                if lease is None:
                    if time.monotonic() >= ends:
                        return None
                    self._wait(BUSY_POLL_S)
                    continue
                while not lease.ready:
                    self._wait(POLL_S)
                if not lease.broken:
                    return lease
                cache.release(lease, record=False)
                loads = False  # compute what could not be loaded

    def finish(
        self, lease: Lease, num_blocks: int | None = None, *, prompt: Prompt | None = None
    ) -> None:
        """Add the blocks that were computed to the cache, and end the lease.

        On an accelerator, the default stream may still be writing these blocks; any other stream
        must have ended.

        num_blocks: full blocks, counted from the start of the prompt; 0 to add none, None for all
        of the prompt.
        prompt: the lease's prompt with generated tokens behind it whose KV is in its slots, so that
        these are added, too. The last token that was sampled has no KV yet.
        """
        with self._open() as cache:
            if prompt is not None:
                begins = prompt.labels[: len(lease.labels)] == lease.labels
                if prompt.namespace != lease.namespace or not begins:
                    raise UsageError("prompt: it does not begin with the prompt of the lease")
            labels = lease.labels if prompt is None else prompt.labels
            if num_blocks is None:
                num_blocks = len(labels)
            limit = min(len(labels), len(lease.slots))
            if not 0 <= num_blocks <= limit:  # before anything of the lease is changed
                raise UsageError(
                    f"finish: {num_blocks} blocks can't be added, since the lease has slots for "
                    f"{limit} full blocks; pass num_blocks=0 to {limit}, or fetch with a larger "
                    "num_tokens"
                )
            lease.labels = labels
            num_reused = lease.num_shared
            if num_blocks > num_reused:
                cache.commit(lease, num_blocks)
            cache.release(lease)
            lease.num_ended = num_reused
            self._condition.notify_all()  # there may be copies to store, and room

    def stored(self, prompt: Prompt) -> Future[int]:
        """Return how many of a prompt's tokens storage has acknowledged, when that is settled.

        The number counts from the start of the prompt. It is settled when the next block is not on
        its way to storage: because all are there, or because the block was not worth a write or
        was evicted before it. Nothing waits for the future. It fails with ``Closed`` if the cache
        was closed before.
        """
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # it can't be cancelled
        with self._open():
            self._awaited.append((future, prompt))
            self._condition.notify_all()
        return future

    # -- the cache --------------------------------------------------------------------------------

    def observe_prefill(self, num_before: int, num_tokens: int, seconds: float) -> None:
        """Report to the planner that a piece of prefill took ``seconds``."""
        with self._open() as cache:
            cache.observe_prefill(num_before, num_tokens, seconds)

    def call(self, function: Callable[[Cache], T]) -> T:
        """Return ``function(cache)``, called while no other thread uses the cache."""
        with self._open() as cache:
            return function(cache)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until everything that is due is in storage. Return False after ``timeout_s``."""
        with self._open() as cache:
            ends = time.monotonic() + timeout_s
            while cache.is_busy:
                if time.monotonic() > ends:
                    return False
                self._wait(POLL_S)
            return True

    def close(self, timeout_s: float = 60.0) -> None:
        """Flush, and close the cache. The end of the process does it, too.

        Safe to call twice; does nothing in a forked child.
        """
        if not self.is_usable:
            return
        self.flush(timeout_s)
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()
        atexit.unregister(self.close)
        self._cache.close()

    @contextmanager
    def _open(self) -> Iterator[Cache]:
        self._process.must_be_here("the cache")  # first: the lock may be held for ever in a child
        with self._condition:
            if self._closed:
                raise Closed("the cache is closed; make a new one")
            yield self._cache

    def _wait(self, seconds: float) -> None:
        """Let other threads use the cache for ``seconds``, then poll."""
        self._condition.wait(seconds)
        if self._closed:
            raise Closed("the cache was closed meanwhile")
        self._cache.poll()

    # -- the thread -------------------------------------------------------------------------------

    def _keep_polling(self) -> None:
        try:
            while self._make_progress():
                with self._condition:
                    if not self._closed:
                        self._condition.wait(self._pause_s())
        finally:  # also if a plug-in of a tier raised what no tier may raise
            while self._awaited:
                future, _ = self._awaited.popleft()
                future.set_exception(Closed("the cache was closed before that was stored"))

    def _make_progress(self) -> bool:
        """Do what is due. Return False after ``close``."""
        with self._condition:
            self._cache.poll()
            self._begin_prefetches()
            settled = self._take_settled()
            is_open = not self._closed
        for future, num_tokens in settled:  # callbacks may call the cache
            future.set_result(num_tokens)
        return is_open

    def _pause_s(self) -> float:
        is_busy = self._cache.is_busy or self._awaited or self._unread() is not None
        return BUSY_POLL_S if is_busy else IDLE_POLL_S

    def _unread(self) -> QueuedPrompt | None:
        """Return the first queued prompt that is not read ahead yet."""
        return next((each for each in self._queued if each.begun is None), None)

    def _begin_prefetches(self) -> None:
        """Read queued prompts ahead, in their order, as far as there is room."""
        while (queued := self._unread()) is not None:
            namespace, labels = queued.prompt.namespace, queued.prompt.labels
            if self._cache.lookup(namespace, labels):
                return  # storage has not answered yet
            queued.begun = self._cache.prefetch(namespace, labels)
            if queued.begun is None:
                return

    def _take_settled(self) -> list[tuple[Future[int], int]]:
        """Return the futures that are settled. Writes begin in order, so others wait longer."""
        settled = []
        while self._awaited:
            future, prompt = self._awaited[0]
            num_blocks, is_coming = self._cache.stored(prompt.namespace, prompt.labels)
            if is_coming:
                break
            self._awaited.popleft()
            settled.append((future, num_blocks * self.block_size))
        return settled
