"""Block events over ZeroMQ, in the format that vLLM and SGLang publish and routers read.

    PUB     topic, number, [time, [event, ...], data_parallel_rank]
    ROUTER  a requested number  -->  "", topic, number, batch  for each kept from it on, then an end
            "snapshot"          -->  "", number, publisher, batch ...    the state after that number

A number has eight bytes, big-endian, and counts batches from 0. A batch is a msgpack array; its
events are maps.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from kvtier.core.errors import ConfigError, install_command
from kvtier.observe.block_events import CLEARED, ChangeLog
from kvtier.observe.block_events import Event as BlockEvent
from kvtier.observe.event_peers import EventPeers

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""Polling interval of the log. Events between two polls form one batch."""
MAX_EVENTS = 256
"""Largest number of events in one batch."""
MAX_TOKENS = 1 << 18
"""Tokens in the events of a batch beyond which it is complete."""
MAX_UNREAD = 1000
"""Batches queued per subscriber. A slow one loses further batches; it sees the gap in the numbers
and may request a replay."""
MAX_UNREAD_ANSWERS = 16
"""Batches queued per replay client. The next ones follow when it has read some."""
ANSWERS_AT_ONCE = 64
"""Batches of one replay that are sent before the next replay continues."""
SEND_BUFFER_BYTES = 256 << 10
"""Send buffer of the kernel for one connection."""
HANDSHAKE_MS = 5000
"""Time limit of a connection's handshake."""
ANSWER_PAUSE_S = 0.005
"""Interval of retries while replay clients have not read."""
MAX_KEPT, MAX_KEPT_BYTES = 10_000, 64 << 20
"""Limits of the batches that can be replayed."""
END = (-1).to_bytes(8, "big", signed=True)
"""Number of the last message of a replay."""
CLOSE_MS = 1000
"""Longest wait at close for the last batches to be delivered."""
SNAPSHOT = b"snapshot"
"""Request for the present state, as vLLM spells it. No number of a batch is as large."""
MAX_SNAPSHOT_EVENTS = 8
"""Largest number of events in one of its batches. Each has up to 256 blocks with their tokens."""
MAX_SNAPSHOT_BYTES = 64 << 20
"""Largest answer to it. Batches beyond this size are left out."""
SNAPSHOT_SHARE = 0.1
"""Largest share of the publisher's time that snapshots may take."""
QUESTION_BYTES = 1024
"""Maximum size of a replay request; longer messages are not read."""


class Translator(Protocol):
    """Turns the changes of a log into events. Used on the publisher's thread."""

    def of(self, changes: Sequence[Any]) -> Iterator[BlockEvent]:
        """Yield the events of some changes."""

    def clear(self) -> None:
        """Forget all blocks."""

    def snapshot(self) -> Iterator[BlockEvent]:
        """Yield events that bring a new reader to the present state."""


class Publisher:
    """Publishes the changes in ``log`` on its own thread, from ``start`` to ``close``.

    endpoint, replay: addresses to bind, such as "tcp://127.0.0.1:5557"; "" for no replay.
    topic: prefix of every batch.
    Raises ``ConfigError`` if an address cannot be bound or a package is missing.
    """

    def __init__(
        self, log: ChangeLog[Any], endpoint: str, replay: str = "", topic: str = ""
    ) -> None:
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ConfigError(
                f"events: {error}; install what they need: {install_command('events')}"
            ) from error
        self._log = log
        self._topic = topic.encode()
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_kept_bytes = 0
        self._num_sent = 0
        self._events: Translator | None = None
        self._stop = Event()
        self._thread = Thread(target=self._run, name="kvtier-events", daemon=True)
        self._replay: zmq.Socket[bytes] | None = None
        self._answers: dict[bytes, int] = {}  # number to send next, by client
        self._wants_snapshot: set[bytes] = set()  # clients
        self._snapshot_at = 0.0  # when the next one may be made
        self._id = uuid4().bytes
        self._peers = EventPeers()
        self._poller = zmq.Poller()  # creating it costs as much as a wait
        try:
            self._pub = self._bind(zmq.PUB, endpoint, MAX_UNREAD)
            if replay:
                self._replay = self._bind(zmq.ROUTER, replay, MAX_UNREAD_ANSWERS)
                self._poller.register(self._replay, zmq.POLLIN)
            self._peers.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _bind(self, kind: int, endpoint: str, most_unread: int) -> zmq.Socket[bytes]:
        import zmq

        socket = self._context.socket(kind)
        socket.set_hwm(most_unread)
        socket.setsockopt(zmq.MAXMSGSIZE, QUESTION_BYTES)
        socket.setsockopt(zmq.SNDBUF, SEND_BUFFER_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        is_replay = kind == zmq.ROUTER
        if is_replay:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # report clients that do not read
        self._peers.watch(socket, is_replay)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"events: can't publish at {endpoint!r}: {error.strerror}; write for instance "
                "tcp://127.0.0.1:5557"
            ) from error
        return socket

    @property
    def endpoints(self) -> list[str]:
        """The endpoints of events and replay, for callers that bound port 0."""
        import zmq

        sockets = [self._pub] if self._replay is None else [self._pub, self._replay]
        return [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in sockets]

    @property
    def max_descriptors(self) -> int:
        """Descriptors that its readers may use."""
        return self._peers.max_descriptors

    def start(self, events: Translator) -> None:
        """Start publishing. events: translates the changes of the cache."""
        self._events = events
        self._thread.start()

    def close(self) -> None:
        """Publish what is in the log, and end. Safe to call twice."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._peers.close()
        if not self._context.closed:
            self._context.destroy(linger=CLOSE_MS)

    def _run(self) -> None:
        self._send([CLEARED])  # events of an earlier process are void
        while not self._stop.is_set():
            self._guarded(self._wait)
            self._guarded(self._publish)
        self._guarded(self._publish)

    def _wait(self) -> None:
        """Wait until the next batch is due.

        Replay requests are received at once, and replays continue meanwhile, as fast as they are
        read.
        """
        if self._replay is None:
            self._stop.wait(TICK_S)
            return
        ends_at = time.monotonic() + TICK_S
        while (left_s := ends_at - time.monotonic()) > 0 and not self._stop.is_set():
            pause_s = min(left_s, ANSWER_PAUSE_S) if self._answers else left_s
            if self._poller.poll(math.ceil(1000 * pause_s)):
                self._hear(self._replay)
            for asker in list(self._answers):
                self._answer(self._replay, asker)
        if self._wants_snapshot and time.monotonic() >= self._snapshot_at:
            self._send_snapshot(self._replay)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run ``work``. On failure, make readers start again rather than keep wrong state."""
        try:
            work()
        except Exception:
            logger.exception("events not published")
            self._log.lose()
            self._stop.wait(TICK_S)

    def _publish(self) -> None:
        assert self._events is not None, "it was started"
        changes, was_lost = self._log.take()
        if was_lost:  # the remaining changes cannot be ordered
            logger.warning("events lost, readers begin anew changes=%d", len(changes))
            self._events.clear()
            self._send([CLEARED])
            return
        for batch in _batches(self._events.of(changes)):
            self._send(batch)

    def _send(self, batch: Sequence[BlockEvent]) -> None:
        import zmq

        payload = self._payload(batch)
        number = self._num_sent
        self._num_sent += 1
        self._keep(number, payload)
        self._peers.published_bytes += len(payload)
        self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    def _payload(self, batch: Sequence[BlockEvent]) -> bytes:
        return self._encode([time.time(), batch, None])  # Dynamo refuses two elements, and four

    def _keep(self, number: int, payload: bytes) -> None:
        if self._replay is None:
            return
        self._kept.append((number, payload))
        self._num_kept_bytes += len(payload)
        while len(self._kept) > MAX_KEPT or self._num_kept_bytes > MAX_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft()[1])

    def _hear(self, replay: zmq.Socket[bytes]) -> None:
        """Receive a replay request. It replaces the client's earlier one."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != len(END):
            logger.warning("no replay, the question has frames=%d", len(frames))
            return
        asker, _, question = frames
        if question == SNAPSHOT:
            self._wants_snapshot.add(asker)
        else:
            self._answers[asker] = int.from_bytes(question, "big")

    def _send_snapshot(self, replay: zmq.Socket[bytes]) -> None:
        """Send the present state to all that wait for it, some of which may have left.

        Live batches behind the number in front continue it.
        """
        import zmq

        assert self._events is not None, "it was started"
        askers, self._wants_snapshot = self._wants_snapshot, set()
        begun = time.monotonic()
        self._publish()  # so that the number stands for the state
        number = self._num_sent - 1
        frames, num_bytes = [number.to_bytes(8, "big", signed=True), self._id], 0
        for batch in _batches(self._events.snapshot(), MAX_SNAPSHOT_EVENTS):
            frames.append(self._payload(batch))
            num_bytes += len(frames[-1])
            if num_bytes > MAX_SNAPSHOT_BYTES:
                break
        ended = time.monotonic()
        self._snapshot_at = ended + (ended - begun) / SNAPSHOT_SHARE
        self._peers.snapshot_bytes += num_bytes
        num_lost = 0
        for asker in askers:
            try:
                replay.send_multipart([asker, b"", *frames], zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:  # it reads nothing, or has disconnected
                num_lost += 1
        if num_lost:
            logger.warning("no snapshot sent readers=%d", num_lost)

    def _answer(self, replay: zmq.Socket[bytes], asker: bytes) -> None:
        """Send the client more of its replay, as much as its queue has room for."""
        import zmq

        oldest = self._kept[0][0] if self._kept else self._num_sent
        at = min(max(self._answers[asker], oldest), self._num_sent) - oldest
        try:
            for number, payload in islice(self._kept, at, at + ANSWERS_AT_ONCE):
                told = [asker, b"", self._topic, number.to_bytes(8, "big"), payload]
                replay.send_multipart(told, zmq.NOBLOCK, copy=False)
                self._answers[asker] = number + 1
            if at + ANSWERS_AT_ONCE >= len(self._kept):
                replay.send_multipart([asker, b"", b"", END, b""], zmq.NOBLOCK)
                del self._answers[asker]
        except zmq.Again:
            return  # its queue is full
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            del self._answers[asker]  # it disconnected


def is_local(endpoint: str) -> bool:
    """Whether only programs on this machine can reach the endpoint."""
    local = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:", "ipc://", "inproc://")
    return endpoint.startswith(local)


def _batches(events: Iterator[BlockEvent], most: int = MAX_EVENTS) -> Iterator[list[BlockEvent]]:
    batch, num_tokens = list[BlockEvent](), 0
    for event in events:
        batch.append(event)
        tokens = event.get("token_ids")
        num_tokens += len(tokens) if isinstance(tokens, list) else 0
        if len(batch) >= most or num_tokens >= MAX_TOKENS:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch
