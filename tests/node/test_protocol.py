"""Messages with any content, cut anywhere: a bad process harms only itself."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.node.wire import protocol
from kvtier.node.wire.protocol import Frames, FromEngine, ProtocolError
from tests.kit.waiting import wait_until
from tests.node.harness import BLOCK, SCOPE, LocalNode, bare, keys, local_node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNode]:
    with local_node(tmp_path_factory.mktemp("node")) as node:
        yield node


def is_well(node: LocalNode) -> bool:
    """Whether another engine stores a block and finds it."""
    with bare(node.config.socket) as other:
        partition = other.enter("well")
        told = other.ask(protocol.ReserveRequest(3, partition, keys(7)))
        if told.new == b"\1":
            other.send(protocol.CommitNotice(partition, told.slots, protocol.pack([0])))
        found = other.ask(protocol.LookupRequest(4, partition, keys(7)))
        other.send(protocol.DetachNotice())
        other.is_closed()
        return bool(found.places == bytes([protocol.MEMORY]))


# -- frames ----------------------------------------------------------------------------------------


@given(contents=st.lists(st.binary(max_size=50), max_size=8), data=st.data())
def test_frames_come_whole_however_they_are_cut(contents: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(struct.pack("<I", len(content)) + content for content in contents)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    frames, found = Frames(), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += take(frames, stream[begin:end])
    assert found == contents


def take(frames: Frames, received: bytes) -> list[bytes]:
    """Return the frames that are complete with these bytes."""
    found = []
    while received:
        memory = frames.memory()
        num = min(len(memory), len(received))
        memory[:num] = received[:num]
        received = received[num:]
        frames.received(num)
        while (content := frames.next()) is not None:
            found.append(bytes(content))
    return found


def test_long_frame_is_refused_before_it_arrives() -> None:
    frames = Frames(100)
    assert take(frames, struct.pack("<I", 100) + bytes(100)) == [bytes(100)]
    with pytest.raises(ProtocolError, match="101 bytes"):
        take(frames, struct.pack("<I", 101))


def test_frame_of_any_length_comes_whole_and_its_memory_is_given_back() -> None:
    frames = Frames()
    for size in (3, protocol.RECEIVED_AT_ONCE, protocol.MAX_KEPT_BYTES + 1, 5, 70_000):
        content = bytes(number % 251 for number in range(size))
        stream = struct.pack("<I", size) + content
        assert take(frames, stream + stream[:2]) == [content]
        assert take(frames, stream[2:]) == [content]
    assert len(frames.memory()) <= protocol.MAX_KEPT_BYTES


def test_message_comes_back_and_a_newer_field_is_ignored() -> None:
    told = protocol.ReleaseNotice(3, protocol.pack([1, 2]))
    content = protocol.frame(told)[4:]
    assert protocol.decode_engine(content) == told
    longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(content), "of a newer version"])
    assert protocol.decode_engine(longer) == told


def test_part_of_a_key_and_too_many_keys_are_refused() -> None:
    assert list(protocol.split_keys(keys(1, 2), 8)) == [keys(1), keys(2)]
    with pytest.raises(ProtocolError):
        protocol.split_keys(keys(1)[:-1], 8)
    with pytest.raises(ProtocolError):
        protocol.split_keys(bytes(protocol.MAX_KEYS + 1), 1)
    with pytest.raises(ProtocolError):
        protocol.unpack(bytes(9))


def test_largest_message_fits_into_a_frame() -> None:
    most = bytes(protocol.MAX_KEYS * protocol.MAX_KEY_BYTES)
    frame = protocol.frame(protocol.PromoteRequest(1, 1, most, most))
    assert len(frame) <= protocol.MAX_FRAME_BYTES


# -- bad processes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", protocol.MAX_FIRST_BYTES + 1),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 0),
        struct.pack("<I", 6) + msgspec.msgpack.encode(["Nope", 1]),
        protocol.frame(protocol.OpenRequest(1, SCOPE, BLOCK, 8)),
        protocol.frame(protocol.AttachAnswer(1, 1, 1, 1, "i")),
    ],
    ids=["text", "long", "garbage", "empty", "unknown", "not attached", "an answer"],
)
def test_first_message_that_is_wrong_ends_the_connection(node: LocalNode, content: bytes) -> None:
    with bare(node.config.socket) as bad:
        bad.socket.sendall(content)
        assert bad.is_closed()
    assert is_well(node)


@pytest.mark.parametrize(
    "make",
    [
        lambda partition: protocol.AttachRequest(9, protocol.VERSION, "again"),
        lambda partition: protocol.LookupRequest(9, partition + 1000, keys(1)),
        lambda partition: protocol.LookupRequest(9, -1, keys(1)),
        lambda partition: protocol.LookupRequest(9, partition, keys(1)[1:]),
        lambda partition: protocol.ReserveRequest(9, partition, keys(1) + b"x"),
        lambda partition: protocol.FetchRequest(9, partition, keys(1), math.nan),
        lambda partition: protocol.FindRequest(9, partition, b"xyz", 1.0),
        lambda partition: protocol.ReleaseNotice(partition, bytes(7)),
        lambda partition: protocol.CommitNotice(
            partition, protocol.pack([1, 2]), protocol.pack([0])
        ),
        lambda partition: protocol.CommitNotice(partition, protocol.pack([1]), protocol.pack([-1])),
        lambda partition: protocol.WatchNotice(partition, 1, b"abc"),
        lambda partition: protocol.LookupRequest(9, partition, bytes(8 * (protocol.MAX_KEYS + 1))),
    ],
    ids=[
        "attach twice",
        "no partition",
        "negative partition",
        "cut key",
        "key and a half",
        "no number",
        "cut key, later",
        "cut slot",
        "fewer depths",
        "negative depth",
        "cut key to watch",
        "too many keys",
    ],
)
def test_message_that_is_wrong_ends_the_connection(
    node: LocalNode, make: Callable[[int], FromEngine]
) -> None:
    with bare(node.config.socket) as bad:
        bad.send(make(bad.enter()))
        assert bad.is_closed()
    assert is_well(node)


def test_slots_of_others_are_left_alone(node: LocalNode) -> None:
    """An engine can't end another one's leases and reservations, whatever slots it names."""
    with bare(node.config.socket) as good, bare(node.config.socket) as bad:
        partition = good.enter("good")
        slots = good.ask(protocol.ReserveRequest(3, partition, keys(31, 32))).slots
        assert bad.enter("bad") == partition
        anything = protocol.pack([*protocol.unpack(slots).tolist(), -1, 10**15])
        none = protocol.pack([0] * 4)
        bad.send(
            protocol.ReleaseNotice(partition, anything),
            protocol.AbortNotice(partition, anything),
            protocol.CommitNotice(partition, anything, none),
            protocol.DistrustNotice(partition, anything),
        )
        found = bad.ask(protocol.LookupRequest(4, partition, keys(31, 32)))
        assert found.places == bytes([protocol.ARRIVING] * 2)
        good.send(protocol.CommitNotice(partition, slots, protocol.pack([0, 1])))
        found = good.ask(protocol.LookupRequest(5, partition, keys(31, 32)))
        assert found.places == bytes([protocol.MEMORY] * 2)


def test_key_that_is_named_twice_has_one_slot(node: LocalNode) -> None:
    with bare(node.config.socket) as engine:
        partition = engine.enter()
        told = engine.ask(protocol.ReserveRequest(3, partition, keys(41, 42, 41)))
        assert (told.new, told.known) == (b"\1\1\0", b"\0\0\1")
        assert len(protocol.unpack(told.slots)) == 2
        engine.send(protocol.CommitNotice(partition, told.slots, protocol.pack([0, 1])))
        found = engine.ask(protocol.LookupRequest(4, partition, keys(41, 41)))
        engine.send(protocol.ReleaseNotice(partition, found.slots))
        assert engine.ask(protocol.LookupRequest(5, partition, keys(41))).places == b"\2"
        node.check()


def test_process_that_reads_no_answers_is_not_read_either(node: LocalNode) -> None:
    """The node keeps few answers for it, and serves the others meanwhile."""
    with bare(node.config.socket) as engine:
        partition = engine.enter()
        engine.socket.setblocking(False)
        frame = protocol.frame(protocol.LookupRequest(3, partition, keys(*range(1000))))
        with suppress(BlockingIOError):
            while True:
                engine.socket.send(frame)
        assert is_well(node)
        connections = list(node.server._connections)
        assert max(connection._frames.num_unsent for connection in connections) < 4 << 20


def test_many_small_messages_do_not_keep_others_waiting(node: LocalNode) -> None:
    """Messages of one process are handled in turns."""
    with bare(node.config.socket) as busy:
        partition = busy.enter("busy")
        turns: list[int] = []
        frames = next(
            connection._frames
            for connection in node.server._connections
            if connection._engine and connection._engine.name == "busy"
        )
        take_turn = frames._take_turn

        def count() -> None:
            turns.append(1)
            take_turn()

        node.do(lambda: setattr(frames, "_take_turn", count))
        busy.send(*[protocol.UseNotice(partition, keys(*range(500)))] * 200)
        assert busy.ask(protocol.LookupRequest(9, partition, keys(1))).places
        assert len(turns) > 3
        assert is_well(node)


# -- anything --------------------------------------------------------------------------------------

_numbers = st.one_of(st.integers(-2, 40), st.integers(-(2**63), 2**64 - 1))
_slots = st.lists(st.integers(-2, 70), max_size=5).map(protocol.pack)
_contents = st.one_of(
    st.binary(max_size=40),
    _slots,
    st.lists(st.integers(0, 5), max_size=5).map(lambda some: keys(*some)),
    # as many as one message may have, and more
    st.builds(
        lambda some, num: some * (num // len(some)),
        st.lists(st.integers(0, 90), min_size=1, max_size=90).map(lambda some: keys(*some)),
        st.sampled_from([8 * protocol.MAX_AT_ONCE + 8, 8 * protocol.MAX_KEYS, 1 << 20]),
    ),
)


def _field(name: str, kind: object) -> st.SearchStrategy[object]:
    if name == "partition":
        return st.sampled_from([0, 0, 0, 1, -1])
    if kind in (bytes, protocol.Keys, protocol.OneKey):
        return _contents
    if kind is float:
        return st.floats()
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.text(max_size=5)
    if kind is int:
        return _numbers
    numbers = st.integers(-(2**63), 2**63 - 1)
    small = st.integers(0, 5)
    said = st.one_of(
        st.tuples(numbers, numbers, numbers, numbers, st.floats()),
        st.tuples(small, small, small, st.just(protocol.MAX_KEYS), st.floats(0, 9)),
    )
    return st.builds(
        lambda some, times: some * times,
        st.lists(said, max_size=3),
        st.sampled_from([1, 1, protocol.MAX_STATEMENTS // 3, 1000]),
    )


def _message(kind: type[FromEngine]) -> st.SearchStrategy[FromEngine]:
    fields = msgspec.structs.fields(kind)
    return st.builds(kind, **{field.name: _field(field.name, field.type) for field in fields})


_messages = st.one_of([_message(kind) for kind in get_args(FromEngine)])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(messages=st.lists(_messages, max_size=12))
def test_any_messages_leave_the_node_well(node: LocalNode, messages: list[FromEngine]) -> None:
    with bare(node.config.socket) as bad:
        bad.enter("anything", client="anyone")
        with suppress(OSError):
            bad.send(*messages, protocol.LookupRequest(5, 0, keys(1)), protocol.DetachNotice())
        assert bad.is_closed()
    node.check()
    with bare(node.config.socket) as last:
        last.attach("anything", client="anyone")
        last.send(protocol.DetachNotice())
        assert last.is_closed()
    engines = node.server.registry.engines
    node.until(lambda: "anything" not in [engine.name for engine in engines.values()])
    wait_until(lambda: is_well(node))
