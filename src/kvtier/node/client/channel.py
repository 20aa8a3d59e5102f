"""Client of a node: requests with deadlines over a Unix socket, and the node's memory mapped.

An engine never waits for the node. Each request has a deadline; after some failures in a row a
breaker refuses requests for a while. A client reconnects by itself, also to a node that has new
memory. Notices on slots are sent as soon as the node takes them, also over a later connection.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import TypeVar
from uuid import uuid4
from weakref import WeakValueDictionary

import numpy as np

from kvtier.cache.guard import PartitionFacts
from kvtier.core.errors import CacheError
from kvtier.core.system.process import OwnerProcess
from kvtier.core.system.user_paths import user_path
from kvtier.devices.base import Memory
from kvtier.index.selection import Int64s
from kvtier.node.wire import protocol
from kvtier.node.wire.protocol import FromNode, Message, Request
from kvtier.tiers.breaker import Breaker

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

FAILURES_UNTIL_OPEN = 3
GOODBYE_S = 1.0
"""Longest time that ``close`` waits for the node."""
LISTEN_S = 0.05
"""Seconds between attempts to receive late answers, and to send what the node has not taken."""

SlotNotice = (
    protocol.CommitNotice | protocol.AbortNotice | protocol.ReleaseNotice | protocol.DistrustNotice
)
"""Notices that the node must have, or slots stay in use."""
Advice = (
    protocol.UseNotice
    | protocol.PromptNotice
    | protocol.ContinueNotice
    | protocol.HintNotice
    | protocol.DescribeNotice
    | protocol.CostsNotice
)
"""Notices that are left out while the node takes no messages."""


class NodeError(CacheError):
    """The node is not there, did not answer in time, or refused the request."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MappedMemory:
    """Memory of a node in this process.

    instance: name of the memory; a node that was started anew has another one. memory: the arena.
    segment_bytes: no copy may cross a multiple of it. storages: the node's storage tiers, fastest
    first. describes: whether the node asks for descriptions of blocks.
    """

    instance: str
    memory: Memory
    segment_bytes: int
    storages: Sequence[str]
    describes: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class OpenedPartition:
    """A partition of a node, as one connection knows it.

    number: of the partition in messages. generations: int64 [num_slots], shared with the node.
    capacity_bytes: of the node for this partition; 0 if the node does not report it.
    """

    number: int
    mapped: MappedMemory
    generations: Int64s
    capacity_bytes: int


class Channel:
    """One connection, used by one thread at a time.

    Args:
        path: of the socket.
        hello: the message that attaches.
        until_s: deadline, by ``time.monotonic``.
        known: return the memory of an instance if this process has mapped it.

    Attributes:
        undelivered: notices on slots that the node has not received, once the connection is lost.

    Raises:
        NodeError: the node is not there, not in time, or refuses.
    """

    def __init__(
        self,
        path: Path,
        hello: protocol.AttachRequest,
        until_s: float,
        known: Callable[[str], MappedMemory | None],
    ) -> None:
        self._frames = protocol.Frames()
        self._ready: deque[FromNode] = deque()
        self._fds: deque[int] = deque()
        self._unsent: deque[_Unsent] = deque()
        self._num_requests = 0
        self._partitions: dict[PartitionFacts, OpenedPartition] = {}
        self._requests: dict[int, Request] = {}  # that the node will answer
        self._watches: set[int] = set()
        self._seconds: dict[int, float] = {}
        self.undelivered: list[SlotNotice] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, protocol.SOCKET_BYTES)
            self._set_deadline(until_s)
            self._socket.connect(str(path))
            welcome = self.request(hello, protocol.AttachAnswer, until_s)
        except OSError as error:
            self.close()
            raise NodeError(f"{path}: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise
        try:
            with self._next_fd() as fd:
                self.mapped = known(welcome.instance) or _map(fd, welcome)
        except BaseException:
            self.close()
            raise

    def has_partition(self, facts: PartitionFacts) -> bool:
        """Whether a partition was opened on this connection."""
        return facts in self._partitions

    def partition(self, facts: PartitionFacts, until_s: float) -> OpenedPartition:
        """Return a partition; open it at its first use."""
        if facts not in self._partitions:
            wanted = protocol.OpenRequest(
                0, facts.scope, facts.block_bytes, facts.key_bytes, facts.group_bytes
            )
            self.request(wanted, protocol.OpenAnswer, until_s)
        return self._partitions[facts]

    def request(self, message: Request, kind: type[Answer], until_s: float) -> Answer:
        """Send a message with the next request number. Return its answer.

        Raises:
            NodeError: the node refuses, or does not answer in time. An answer that comes
                later, or is of another kind, is undone.
        """
        self._num_requests += 1
        message.id = number = self._num_requests
        self._requests[number] = message
        self._push(message)
        try:
            self._flush(until_s)
            while True:
                answer = self._receive(until_s)
                if getattr(answer, "id", None) == number:
                    break
                self._undo(answer)
        except TimeoutError:
            self._give_up(number)
            self._send_rest()
            raise NodeError("the node did not answer in time") from None
        if isinstance(answer, kind):
            del self._requests[number]
            self._send_rest()
            return answer
        self._undo(answer)
        self._send_rest()
        if isinstance(answer, protocol.RefusedAnswer):
            raise NodeError(answer.reason)
        raise NodeError(f"the node answered with {type(answer).__name__}")

    def notify(self, message: Message) -> bool:
        """Send a message without an answer, as soon as the node takes it. Never waits.

        Returns False if it is left out. Raises ``NodeError`` if the connection is lost.
        """
        if isinstance(message, Advice) and self._unsent:
            return False
        if isinstance(message, protocol.WatchNotice):
            self._watches.add(message.watch)
        self._push(message)
        with suppress(TimeoutError):
            self._flush(0.0)
        return True

    def hear(self) -> None:
        """Send and take in what can be without waiting."""
        with suppress(NodeError, TimeoutError):
            while True:
                self._undo(self._receive(0.0))
        self._send_rest()

    @property
    def is_behind(self) -> bool:
        """Whether the node owes a late answer, or has not taken all messages yet."""
        return self.is_open and bool(self._requests or self._unsent)

    def has_ended(self, watch: int) -> bool:
        """Whether an ``EndedNotice`` has arrived, or can't arrive any more."""
        return not self.is_open or watch not in self._watches

    def time_watch(self, watch: int) -> None:
        """Keep the duration in the ``EndedNotice`` of a watch until ``take_seconds``."""
        self._seconds[watch] = 0.0

    def take_seconds(self, watch: int) -> float:
        """Return how long the node took until the end of a timed watch; 0 if it is not known."""
        return self._seconds.pop(watch, 0.0)

    @property
    def is_open(self) -> bool:
        """Whether the connection can be used."""
        return self._socket.fileno() >= 0

    def say_goodbye(self, until_s: float) -> None:
        """Send a ``DetachNotice``, by which this client uses no slot any more, and close.

        Waits for late answers first.
        """
        with suppress(NodeError, TimeoutError):
            self._flush(until_s)
            while self._requests:
                self._undo(self._receive(until_s))
            self._push(protocol.DetachNotice())
            self._flush(until_s)
        self.close()

    def close(self) -> None:
        """Close the connection. The node keeps what this process uses until it has ended."""
        if not self.is_open:
            return
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._socket.close()
        self.undelivered += [
            each.message for each in self._unsent if isinstance(each.message, SlotNotice)
        ]
        self._unsent.clear()

    # -- bytes -------------------------------------------------------------------------------------

    def _set_deadline(self, until_s: float) -> None:
        self._socket.settimeout(max(until_s - time.monotonic(), 0.0))

    def _push(self, message: Message) -> None:
        """Queue a message for ``_flush``."""
        self._unsent.append(_Unsent(message, memoryview(protocol.frame(message))))

    def _flush(self, until_s: float) -> None:
        """Send what is queued. Raises ``TimeoutError`` if the node does not take all in time."""
        while self._unsent:
            first = self._unsent[0]
            try:
                self._set_deadline(until_s)
                num = self._socket.send(first.content[first.num_sent :])
            except (TimeoutError, BlockingIOError):
                raise TimeoutError from None
            except OSError as error:
                self._lose()
                raise NodeError(f"the connection is lost: {error.strerror or error}") from None
            first.num_sent += num
            if first.num_sent == len(first.content):
                self._unsent.popleft()

    def _send_rest(self) -> None:
        """Send what is queued, as far as the node takes it at once."""
        if self.is_open:
            with suppress(NodeError, TimeoutError):
                self._flush(0.0)

    def _receive(self, until_s: float) -> FromNode:
        """Return the node's next message. Raises ``TimeoutError`` if there is none in time."""
        while not self._ready:
            try:
                self._set_deadline(until_s)
                num, fds = protocol.receive(self._socket, self._frames)
            except (TimeoutError, BlockingIOError):
                raise TimeoutError from None
            except OSError as error:
                self.close()
                raise NodeError(f"the connection is lost: {error.strerror or error}") from None
            if not num:
                self.close()
                raise NodeError("the node closed the connection")
            self._fds += fds
            try:
                while (content := self._frames.next()) is not None:
                    self._ready.append(protocol.decode_node(content))
            except protocol.ProtocolError as error:
                self.close()
                raise NodeError(str(error)) from None
        answer = self._ready.popleft()
        if isinstance(answer, protocol.OpenAnswer):
            try:
                self._enter(answer)
            except NodeError:
                self.close()
                raise
        elif isinstance(answer, protocol.EndedNotice):
            self._watches.discard(answer.watch)
            if answer.watch in self._seconds:
                self._seconds[answer.watch] = answer.seconds
        elif isinstance(answer, protocol.LookupAnswer) and answer.pending:
            self._watches.add(answer.id)
        return answer

    def _enter(self, opened: protocol.OpenAnswer) -> None:
        """Map the generations of a partition, also if the answer comes too late for its request."""
        message = self._requests.get(opened.id)
        with self._next_fd() as fd:
            if isinstance(message, protocol.OpenRequest):
                size = max(8 * opened.num_slots, mmap.PAGESIZE)
                mapped = _map_file(fd, size, mmap.PROT_READ)
                generations = np.frombuffer(mapped, "<i8")[: opened.num_slots]
                facts = PartitionFacts(
                    message.scope, message.block_bytes, message.key_bytes, message.group_bytes
                )
                self._partitions[facts] = OpenedPartition(
                    opened.partition, self.mapped, generations, opened.capacity_bytes
                )

    @contextmanager
    def _next_fd(self) -> Iterator[int]:
        """Yield the next descriptor that the node has passed, and close it."""
        if not self._fds:  # the kernel drops those that a process has no number for
            raise NodeError("the node's memory did not arrive: too many files may be open here")
        fd = self._fds.popleft()
        try:
            yield fd
        finally:
            os.close(fd)

    def _give_up(self, number: int) -> None:
        """Forget a request if nothing of it was sent. Otherwise its answer is undone later."""
        for at, each in enumerate(self._unsent):
            if not each.num_sent and getattr(each.message, "id", None) == number:
                del self._unsent[at], self._requests[number]
                return

    def _lose(self) -> None:
        """Undo what the node has answered before it closed the connection, and close."""
        with suppress(NodeError, TimeoutError):
            while True:
                self._undo(self._receive(0.0))
        self.close()

    def _undo(self, answer: FromNode) -> None:
        """Release the slots of an answer that arrived too late."""
        if isinstance(answer, protocol.EndedNotice):
            return
        message = self._requests.pop(answer.id, None)
        if not isinstance(message, protocol.PartitionRequest):
            return
        if isinstance(answer, protocol.LookupAnswer | protocol.FetchAnswer):
            slots = protocol.unpack(answer.slots)
            slots = slots[slots >= 0]
            if len(slots):
                self._push(protocol.ReleaseNotice(message.partition, protocol.pack(slots)))
        elif isinstance(answer, protocol.ReserveAnswer) and answer.slots:
            self._push(protocol.AbortNotice(message.partition, answer.slots))


@dataclass(slots=True)
class _Unsent:
    """A message of which ``num_sent`` bytes were sent."""

    message: Message
    content: memoryview
    num_sent: int = 0


def _map_file(fd: int, num_bytes: int, access: int) -> mmap.mmap:
    """Map memory of the node. Raises ``NodeError``, also if the file is shorter."""
    try:
        return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, access)
    except (OSError, ValueError, OverflowError) as error:
        raise NodeError(f"{num_bytes} bytes of the node can't be mapped: {error}") from None


def _map(fd: int, welcome: protocol.AttachAnswer) -> MappedMemory:
    mapped = _map_file(fd, welcome.memory_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    memory = Memory(address, welcome.memory_bytes, "host", mapped)
    return MappedMemory(
        welcome.instance, memory, welcome.segment_bytes, welcome.storages, welcome.describes
    )


class NodeClient:
    """Connections of one process to a node. Any thread may use it.

    Args:
        path: of the node's socket.
        tenant: see ``AttachRequest``.
        engine: name of the engine, the same in all of its processes; a new one by default.
        title: name of the engine for display, with model and port; "" if it has none.
    """

    def __init__(self, path: Path, tenant: str = "", engine: str = "", title: str = "") -> None:
        self.path = user_path(path)
        self.tenant = tenant
        self.engine = engine or f"pid-{os.getpid()}-{uuid4().hex[:12]}"
        self.title = title
        self.breaker = Breaker(time.monotonic, FAILURES_UNTIL_OPEN)
        self.last_error = ""
        self._name = uuid4().hex
        self._lock = Lock()
        self._idle: list[Channel] = []
        self._maps: WeakValueDictionary[str, MappedMemory] = WeakValueDictionary()
        self._mapped: MappedMemory | None = None  # the newest memory
        self._owed: list[tuple[str, SlotNotice]] = []  # by instance: notices that wait
        self._num_failures = self._num_pauses = 0  # not reported yet
        self._listener: Thread | None = None
        self._process = OwnerProcess()
        self._is_attached = False
        self._is_closed = False

    def take(self, until_s: float, is_new: bool = False) -> Channel:
        """Return a connection for this thread alone; ``put_back`` ends its use.

        is_new: whether it is to be a new one.

        Raises:
            NodeError: there is none in time.
        """
        self._enter()
        idle = None if is_new else self._idle_channel()
        if idle is not None:
            return idle
        try:
            return self._connect(until_s)
        except NodeError as error:
            self.note(error)
            raise

    def take_idle(self) -> Channel | None:
        """Return a connection that is not in use, without waiting; None if there is none.

        Raises:
            NodeError: the node is left alone for a while.
        """
        channel = self._idle_channel()
        if channel is not None:
            try:
                self._enter()
            except NodeError:
                self.keep(channel)
                raise
        return channel

    def _enter(self) -> None:
        """Raise ``NodeError`` if no request may be made now."""
        if not self._process.is_here or self._is_closed:
            raise NodeError("the client is closed, or belongs to another process")
        if not self.breaker.enter():
            raise NodeError(f"the node is left alone for a while: {self.last_error}")

    def _idle_channel(self) -> Channel | None:
        """Return a connection that is not in use; None if there is none."""
        while True:
            with self._lock:
                channel = self._idle.pop() if self._idle else None
            if channel is None:
                return None
            channel.hear()
            if channel.is_open and channel.mapped is self._mapped:
                self._send_owed(channel)
            else:
                channel.close()
            if channel.is_open:
                return channel
            self._absorb(channel)

    def _connect(self, until_s: float) -> Channel:
        channel = Channel(self.path, self._hello, until_s, self._maps.get)
        with self._lock:
            self._maps[channel.mapped.instance] = self._mapped = channel.mapped
            self._is_attached = True
            old = [each for each in self._idle if each.mapped is not channel.mapped]
            self._idle = [each for each in self._idle if each.mapped is channel.mapped]
        for each in old:  # or the memory would stay mapped, and the next node waits for that
            each.close()
            self._absorb(each)
        self._send_owed(channel)
        return channel

    @property
    def _hello(self) -> protocol.AttachRequest:
        return protocol.AttachRequest(
            0,
            protocol.VERSION,
            self.engine,
            self.tenant,
            client=self._name,
            title=self.title,
        )

    def tell(self, instance: str, notice: Message) -> Channel | None:
        """Send a notice on a partition of a memory. Never waits, and does not affect the breaker.

        Returns the connection that it was sent over; None if there is no connection. Then a notice
        on slots is sent as soon as there is one, and any other is dropped.
        """
        if not self._process.is_here:
            return None
        channel = self._idle_channel()
        is_sent = False
        if channel is not None and channel.mapped.instance == instance:
            with suppress(NodeError):
                is_sent = channel.notify(notice)
        elif channel is None and isinstance(notice, SlotNotice):
            with self._lock:
                self._owed.append((instance, notice))
        if channel is not None:
            self.keep(channel)
        return channel if is_sent else None

    def _send_owed(self, channel: Channel) -> None:
        """Pass on notices that wait. Those on memory that is gone are forgotten."""
        if self._num_failures:
            with self._lock:
                report = protocol.ReportNotice(self._num_failures, self._num_pauses)
                self._num_failures = self._num_pauses = 0
            with suppress(NodeError):
                channel.notify(report)
        with self._lock:
            owed, self._owed = self._owed, []
        for at, (instance, notice) in enumerate(owed):
            if instance != channel.mapped.instance:
                continue
            try:
                channel.notify(notice)
            except NodeError:  # the connection has this one, if it was not sent
                with self._lock:
                    self._owed += owed[at + 1 :]
                return

    def _absorb(self, channel: Channel) -> None:
        """Keep the notices that a lost connection has not delivered."""
        with self._lock:
            self._owed += [(channel.mapped.instance, each) for each in channel.undelivered]
        channel.undelivered = []

    @contextmanager
    def using(self, channel: Channel) -> Iterator[Channel]:
        """End the use of a connection in the end, and note its outcome. Errors are raised again."""
        failure: NodeError | None = None
        try:
            yield channel
        except NodeError as error:
            failure = error
            raise
        finally:
            self.put_back(channel, failure)

    def put_back(self, channel: Channel, error: NodeError | None = None) -> None:
        """End the use of a connection. error: why the last request failed."""
        self.note(error)
        self.keep(channel)

    def keep(self, channel: Channel) -> None:
        """Return a connection with no request in flight to the idle ones."""
        if not channel.is_open:
            self._absorb(channel)
            return
        with self._lock:
            is_kept = not self._is_closed
            if is_kept:
                self._idle.append(channel)
                if channel.is_behind and self._listener is None:
                    self._listener = Thread(
                        target=self._listen, name="kvtier-node-late", daemon=True
                    )
                    self._listener.start()
        if not is_kept:
            channel.say_goodbye(time.monotonic() + GOODBYE_S)

    def _listen(self) -> None:
        """Hear connections that are behind, on a thread of its own, until none is.

        An engine without requests uses no connection, and the slots of a late answer would stay in
        use.
        """
        while True:
            time.sleep(LISTEN_S)
            with self._lock:
                behind = [each for each in self._idle if each.is_behind]
                for each in behind:
                    each.hear()
                if not behind:
                    self._listener = None
                    return

    def hear(self, channel: Channel) -> None:
        """Receive pending messages of a connection, unless it is in use. Never waits."""
        with self._lock:
            if channel in self._idle:
                channel.hear()

    def note(self, error: NodeError | None) -> None:
        """Note the outcome of a request."""
        is_changed = self.breaker.note(error is None)
        if error is not None:
            self.last_error = str(error)
            with self._lock:
                self._num_failures += 1
                self._num_pauses += is_changed
        if is_changed:
            state = "in use again" if error is None else f"not in use: {error}"
            logger.warning("node %s is %s", self.path, state)

    def close(self) -> None:
        """Detach from the node and close. This process must use no slot any more.

        If a connection was lost, the notice is sent over a new one.
        """
        if not self._process.is_here or self._is_closed:
            return
        until_s = time.monotonic() + GOODBYE_S
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.hear()
            if not channel.is_open:
                self._absorb(channel)
        left = [channel for channel in idle if channel.is_open]
        if not left and self._is_attached and not self.breaker.is_open:
            with suppress(NodeError):
                left = [self._connect(until_s)]
        for channel in left:
            if self._owed:
                self._send_owed(channel)
            channel.say_goodbye(until_s)
        self._mapped = None
