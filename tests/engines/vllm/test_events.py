"""Events of kvtier's own server, read with vLLM's types by vLLM's protocol."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

from kvtier.core.types import DEVICE, HOST
from kvtier.observe.block_events import BlockLog
from kvtier.observe.publisher import Publisher
from tests.cache.tokens.harness import A, B
from tests.observe.test_block_events import Reader, ToldHarness

ANY_PORT = "tcp://127.0.0.1:*"
decode = msgspec.msgpack.Decoder(type=KVEventBatch).decode


class Subscriber:
    """Reads as vLLM's example for subscribers does; batches: by number."""

    def __init__(self, publisher: Publisher) -> None:
        events, replay = publisher.endpoints
        self.sub: Any = zmq.Context.instance().socket(zmq.SUB)
        self.sub.connect(events)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        self.replay: Any = zmq.Context.instance().socket(zmq.DEALER)
        self.replay.connect(replay)
        self.batches: dict[int, KVEventBatch] = {}

    def receive(self) -> bool:
        """Receive the pending events; return whether there is a gap."""
        while self.sub.poll(300):
            _, number, payload = self.sub.recv_multipart()
            self.batches[int.from_bytes(number, "big")] = decode(payload)
        return len(self.batches) <= max(self.batches, default=0)

    def ask_again(self, first: int) -> None:
        self.replay.send_multipart((b"", first.to_bytes(8, "big")))
        while self.replay.poll(5000):
            _, topic, number, payload = self.replay.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return
            assert topic == b"kv@harness"
            self.batches[int.from_bytes(number, "big")] = decode(payload)
        raise AssertionError("the replay does not end")

    def close(self) -> None:
        self.sub.close(linger=0)
        self.replay.close(linger=0)


def test_vllms_types_read_what_a_cache_tells_also_what_was_dropped() -> None:
    harness = ToldHarness()
    log = harness.events
    assert isinstance(log, BlockLog)
    publisher = Publisher(log, ANY_PORT, ANY_PORT, "kv@harness")
    subscriber = Subscriber(publisher)
    try:
        publisher.start(harness.cache.block_events())
        for prompt in (A, B, A):
            harness.serve(prompt)
            subscriber.receive()
        harness.lose_the_device()
        harness.serve(A)
        subscriber.receive()
        assert len(subscriber.batches) > 2
        del subscriber.batches[max(subscriber.batches) - 1]  # as if the network had lost it
        assert subscriber.receive(), "the gap is noticed"
        subscriber.ask_again(0)
        assert not subscriber.receive()
        told = [
            event for at in sorted(subscriber.batches) for event in subscriber.batches[at].events
        ]
    finally:
        subscriber.close()
        publisher.close()
    assert isinstance(told[0], AllBlocksCleared)
    stored = [event for event in told if isinstance(event, BlockStored)]
    assert {(event.medium, event.locality) for event in stored} == {
        ("GPU", "LOCAL"),
        ("CPU", "LOCAL"),
    }
    reader = Reader()
    reader.read(_plain(event) for event in told)
    there = harness.there()
    assert reader.held[DEVICE] == there[DEVICE]
    assert reader.held[HOST] == there[HOST]
    assert set(reader.tokens.values()) == {tuple(A[:2]), tuple(B[:2])}
    harness.close()


def _plain(event: Any) -> dict[str, Any]:
    return {"type": type(event).__name__, **msgspec.structs.asdict(event)}
