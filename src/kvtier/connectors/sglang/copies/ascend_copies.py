"""Copies between SGLang's own device and host pools on Ascend: many pages in one driver call.

SGLang itself issues one 2-D copy per page and tensor, and copies all layers when the first is
requested. Here the pages of a group of layers are one batch call, on a stream of kvtier's. SGLang's
stream waits for each group, so that the event it records for a layer means that this layer has
arrived, and compute can overlap with the copies:

    SGLang's    begin | waits for group 0, its events | waits for group 1, its events | ...
    kvtier's    after begin, group 0 | group 1 | ...

A group is one layer if that is large enough for a call of its own (see ``layers_per_step``). These
copies are opt-in (plugin.py). After any error, SGLang's own copies are used.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from kvtier.connectors.sglang.copies.ascend_parts import AscendPart, PageMove, mha_parts, mla_parts
from kvtier.connectors.sglang.shared.hooks import tell_missing
from kvtier.core.errors import DeviceError
from kvtier.devices import CopyBatch, Direction, Fence
from kvtier.devices.driver_device import DriverDevice
from kvtier.devices.find import look_for
from kvtier.devices.paths import CopyPath

logger = logging.getLogger(__name__)

HOST_POOLS = "sglang.srt.mem_cache.pool_host"
ENGINE = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine.__init__"


class PoolKind(NamedTuple):
    """Kind of host pools: their layout on Ascend, and what returns the parts of a page."""

    layout: str
    parts: Callable[[Any], list[AscendPart]]


POOLS = {
    f"{HOST_POOLS}.mha.MHATokenToKVPoolHost": PoolKind("page_first_direct", mha_parts),
    f"{HOST_POOLS}.mla.MLATokenToKVPoolHost": PoolKind("page_first_kv_split", mla_parts),
}
"""Kinds of host pools by SGLang's class."""
IO_BACKEND = "kernel_ascend"
LOSS = "SGLang copies page by page, and all layers before the first"
"""Consequence, for the log, if kvtier's copies are not used."""


class StreamCopies:
    """Copies of one direction, in the order of the stream that SGLang is about to use."""

    def __init__(self, device: DriverDevice, direction: Direction) -> None:
        self._device = device
        self.direction = direction
        self._queue = device.queue(direction)
        # Per move: the event it began after, and the events SGLang's stream waits for. They are
        # kept until the next move's first event has passed: nothing waits for them any more then.
        self._kept: deque[list[Fence]] = deque()

    def begin(self) -> None:
        """Begin copies that start after everything given to SGLang's stream so far."""
        while len(self._kept) > 1 and self._kept[1][0].passed:
            self._kept.popleft()
        after = self._device.fence()
        self._queue.hold_for(after)
        self._kept.append([after])

    def copy(self, batch: CopyBatch) -> None:
        """Queue copies, and make SGLang's stream wait for them.

        Raises ``DeviceError`` also if the copies are done, but not by a batch call: SGLang's own
        copies are better in that case.
        """
        if not len(batch.size):
            return
        self._queue.submit(batch)
        fence = self._queue.fence()
        fence.hold_compute()
        self._kept[-1].append(fence)
        if reason := _why_no_batch(self._device):
            raise DeviceError(reason)

    def drain(self) -> None:
        """Wait until no copy is in flight, successful or not."""
        self._queue.drain()


class AscendCopies:
    """Hooks around the copies of one SGLang process.

    The device is opened on the first copy, since SGLang does not name it earlier. After any
    exception, SGLang's own code does this copy and all later ones.

    look: finds the device by name; also returns the reasons for other candidates' rejection.
    """

    def __init__(self, look: Callable[[str], Any] = look_for) -> None:
        self._look = look
        self._lock = Lock()
        self._streams: dict[Direction, StreamCopies] = {}
        self._moves: dict[tuple[int, int, int], PageMove] = {}  # loads in progress
        self._said: set[str] = set()
        self.why_not = ""
        """Why SGLang's own copies are used; "" if they are not."""
        self.hooks: dict[str, Callable[..., Any]] = {ENGINE: self._check}
        """Wrappers by the full name of the SGLang function that they wrap."""
        for name, kind in POOLS.items():
            self.hooks[f"{name}.load_to_device_per_layer"] = partial(self._load, kind)
            self.hooks[f"{name}.backup_from_device_all_layer"] = partial(self._back_up, kind)

    def _check(self, make: Callable[..., None], *args: Any, **more: Any) -> None:
        """Warn of hooks that are not installed. SGLang installs all before this call."""
        make(*args, **more)
        tell_missing(self.hooks, LOSS)

    def _load(
        self,
        kind: PoolKind,
        theirs: Callable[..., None],
        pool: Any,
        device_pool: Any,
        host_indices: Any,
        device_indices: Any,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        """Load a layer of the model: the first layer of a group loads the whole group.

        A draft model's pages are loaded with the model's last layer.
        """
        theirs = partial(theirs, pool, device_pool, host_indices, device_indices)
        key = id(pool), id(host_indices), id(device_indices)
        if not self._serves(pool, kind.layout, io_backend, host_indices, device_indices):
            if self._moves.pop(key, None) is None:
                theirs(layer_id, io_backend, is_draft=is_draft)
            else:  # theirs copies all layers with the first one, which was ours
                theirs(0, io_backend)
            return
        if is_draft or not 0 <= layer_id < pool.target_layer_num:
            return
        try:
            with self._lock:
                stream, move = self._streams[Direction.LOAD], self._moves.get(key)
                if move is None or layer_id == 0:
                    move = _move(pool, kind, host_indices, device_indices)
                    stream.begin()
                    self._moves[key] = move
                if layer_id >= move.num_done:
                    end = min(layer_id + move.layers_per_step, move.num_layers)
                    stream.copy(move.batch(Direction.LOAD, range(layer_id, end)))
                    move.num_done = end
                if layer_id == move.num_layers - 1:
                    del self._moves[key]
        except Exception as error:
            self._moves.pop(key, None)
            self._leave(error)
            theirs(0, io_backend)

    def _back_up(
        self,
        kind: PoolKind,
        theirs: Callable[..., None],
        pool: Any,
        device_pool: Any,
        host_indices: Any,
        device_indices: Any,
        io_backend: str,
    ) -> None:
        """Store all layers in one call."""
        if self._serves(pool, kind.layout, io_backend, host_indices, device_indices):
            try:
                with self._lock:
                    move = _move(pool, kind, host_indices, device_indices)
                    stream = self._streams[Direction.STORE]
                    stream.begin()
                    stream.copy(move.batch(Direction.STORE, range(move.num_layers)))
            except Exception as error:
                self._leave(error)
            else:
                return
        theirs(pool, device_pool, host_indices, device_indices, io_backend)

    def _serves(
        self, pool: Any, layout: str, io_backend: str, host_indices: Any, device_indices: Any
    ) -> bool:
        """Whether kvtier does these copies. Logs once why a pool is not served."""
        if self.why_not or io_backend != IO_BACKEND:
            return False
        if refusal := _refusal(pool, layout, host_indices, device_indices):
            if refusal not in self._said:
                self._said.add(refusal)
                logger.warning("kvtier leaves copies to SGLang: %s; %s", refusal, LOSS)
            return False
        if not self._streams:
            self._open(str(pool._transfer_device))
        return not self.why_not

    def _open(self, name: str) -> None:
        try:
            device, misses = self._look(name)
            if not isinstance(device, DriverDevice):
                reasons = "; ".join(f"{miss.topic}: {miss.note}" for miss in misses)
                self._leave(f"kvtier has no driver for {name} ({reasons})")
            elif reason := _why_no_batch(device):
                self._leave(reason)
            else:
                self._streams = {each: StreamCopies(device, each) for each in Direction}
                logger.info("device=%s copies pages of SGLang's by batch calls", name)
        except Exception as error:
            self._leave(error)

    def _leave(self, why: Exception | str) -> None:
        """Use SGLang's own copies from now on. None of kvtier's is in flight on return."""
        self.why_not = reason = str(why) or repr(why)
        for stream in self._streams.values():
            stream.drain()
        logger.warning("kvtier leaves its copies to SGLang: %s; %s", reason, LOSS)


def _move(pool: Any, kind: PoolKind, host: Any, device: Any) -> PageMove:
    return PageMove(kind.parts(pool), host, device, pool.page_size, pool.target_layer_num)


def _refusal(pool: Any, layout: str, host_indices: Any, device_indices: Any) -> str:
    if pool.layout != layout:
        return f"--hicache-mem-layout is {pool.layout}"
    if {each.device.type for each in (host_indices, device_indices)} != {"cpu"}:
        return "SGLang reads the indices on the device, by a kernel of its own"
    if getattr(pool, "_is_dummy", False):
        return "this rank keeps no host memory of its own"
    if getattr(pool, "_layer_shard_enabled", False):
        return "its layers are shared out between ranks"
    if pool.dcp_size > 1:
        return "decode context parallelism shares out its tokens"
    return ""


def _why_no_batch(device: DriverDevice) -> str:
    return device.paths.why_not.get(CopyPath.BATCH, "")


COPIES = AscendCopies()
"""The one instance of this process: a scheduler has one device."""
