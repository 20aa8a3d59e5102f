"""Clients that look up, store, lose connections, die and come back, against a dictionary.

The sockets, the memory and the processes are real. A process does nothing by itself: the test makes
the calls for it, so that every step has an end.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvtier.cache.guard import PartitionFacts
from kvtier.core.types import Slot
from kvtier.node.client.channel import Channel, NodeClient, NodeError, OpenedPartition
from kvtier.node.server.engines import EngineProcess
from kvtier.node.wire import protocol
from kvtier.node.wire.protocol import FromEngine
from tests.kit.waiting import wait_until
from tests.node.harness import SCOPE, LocalNode, config_of, keys

BLOCK = 1024
NUM_SLOTS = 16
NUM_KEYS = 24
FACTS = PartitionFacts(SCOPE, BLOCK, 8)

some_keys = st.lists(st.integers(0, NUM_KEYS - 1), min_size=1, max_size=6, unique=True)


def content(key: int) -> bytes:
    """Return the bytes of a block, different for each."""
    return (b"block %d;" % key).ljust(16, b".") * (BLOCK // 16)


@dataclass(eq=False)
class Engine:
    """An engine's process, and the slots that it uses.

    leases: key, slot and generation of each lease. reserved: slot by key.
    """

    process: subprocess.Popen[bytes]
    client: NodeClient
    leases: list[tuple[int, Slot, int]] = field(default_factory=list)
    reserved: dict[int, Slot] = field(default_factory=dict)


class Machine(RuleBasedStateMachine):
    engines = Bundle("engines")

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        options = {"host_capacity": "16KiB", "segment_capacity": "4KiB"}
        self.node = LocalNode(config_of(Path(self.folder.name), **options))
        self.committed: set[int] = set()
        self.living: list[Engine] = []
        self.connecting: subprocess.Popen[bytes] | None = None
        self.patches: list[Any] = [
            patch("kvtier.node.server.server.peer_of", self._peer),
            patch("kvtier.node.client.channel.GOODBYE_S", 30.0),  # machines are busy
        ]
        for each in self.patches:
            each.start()

    def _peer(self, _: object) -> EngineProcess:
        assert self.connecting is not None
        pid = self.connecting.pid
        pidfd = os.pidfd_open(pid)
        return EngineProcess(pid, os.geteuid(), pidfd, (pid, os.fstat(pidfd).st_ino))

    # -- one call of an engine ---------------------------------------------------------------------

    def take(self, engine: Engine) -> tuple[Channel, OpenedPartition]:
        self.connecting = engine.process
        until_s = time.monotonic() + 30
        channel = engine.client.take(until_s)
        return channel, channel.partition(FACTS, until_s)

    def tell(self, engine: Engine, notice: FromEngine) -> None:
        assert engine.client._mapped is not None
        self.connecting = engine.process
        engine.client.tell(engine.client._mapped.instance, notice)

    def memory(self, engine: Engine, slot: Slot) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        assert engine.client._mapped is not None
        memory = np.frombuffer(engine.client._mapped.memory.owner, np.uint8)  # type: ignore[call-overload]
        found: np.ndarray[tuple[int], np.dtype[np.uint8]] = memory[
            slot * BLOCK : (slot + 1) * BLOCK
        ]
        return found

    # -- steps -------------------------------------------------------------------------------------

    @rule(target=engines)
    def start(self) -> Engine:
        process = subprocess.Popen(["sleep", "600"])
        engine = Engine(process, NodeClient(self.node.config.socket))
        self.living.append(engine)
        channel, _ = self.take(engine)
        engine.client.put_back(channel)
        return engine

    @rule(engine=engines, wanted=some_keys)
    def look_up(self, engine: Engine, wanted: list[int]) -> None:
        channel, partition = self.take(engine)
        request = protocol.LookupRequest(0, partition.number, keys(*wanted))
        found = channel.request(request, protocol.LookupAnswer, time.monotonic() + 30)
        engine.client.put_back(channel)
        there = [key for key, at in zip(wanted, found.places, strict=True) if at == protocol.MEMORY]
        assert set(there) <= self.committed, "a block that nobody has committed"
        slots = protocol.unpack(found.slots).tolist()
        generations = protocol.unpack(found.generations).tolist()
        engine.leases += zip(there, slots, generations, strict=True)

    @rule(engine=engines, num=st.integers(1, 6))
    def release(self, engine: Engine, num: int) -> None:
        some, engine.leases = engine.leases[:num], engine.leases[num:]
        if some:
            slots = protocol.pack([slot for _, slot, _ in some])
            self.tell(engine, protocol.ReleaseNotice(0, slots))

    @rule(engine=engines, wanted=some_keys)
    def reserve(self, engine: Engine, wanted: list[int]) -> None:
        channel, partition = self.take(engine)
        request = protocol.ReserveRequest(0, partition.number, keys(*wanted))
        told = channel.request(request, protocol.ReserveAnswer, time.monotonic() + 30)
        engine.client.put_back(channel)
        new = [key for key, is_new in zip(wanted, told.new, strict=True) if is_new]
        in_use = {slot for each in self.living for _, slot, _ in each.leases}
        in_use |= {slot for each in self.living for slot in each.reserved.values()}
        for key, slot in zip(new, protocol.unpack(told.slots).tolist(), strict=True):
            assert slot not in in_use, "a slot that somebody uses was given to another"
            assert not any(key in each.reserved for each in self.living), "written by two"
            self.committed.discard(key)
            engine.reserved[key] = slot
            self.memory(engine, slot)[:] = 0xEE

    @rule(engine=engines, num=st.integers(1, 6), is_good=st.booleans())
    def end_write(self, engine: Engine, num: int, is_good: bool) -> None:
        some = list(engine.reserved.items())[:num]
        if not some:
            return
        slots = protocol.pack([slot for _, slot in some])
        for key, slot in some:
            if is_good:
                self.memory(engine, slot)[:] = np.frombuffer(content(key), np.uint8)
                self.committed.add(key)
            del engine.reserved[key]
        depths = protocol.pack(range(len(some)))
        self.tell(
            engine,
            protocol.CommitNotice(0, slots, depths) if is_good else protocol.AbortNotice(0, slots),
        )

    @rule(engine=engines, from_node=st.booleans())
    def lose_connection(self, engine: Engine, from_node: bool) -> None:
        """The engine keeps its slots, and sends its notices over the next connection."""
        if from_node:

            def close() -> None:
                for connection in list(self.node.server._connections):
                    if connection._client == engine.client._name:
                        connection.hang_up()

            self.node.do(close)
        else:
            for channel in engine.client._idle:
                channel.close()

    @rule(engine=engines, wanted=some_keys)
    def give_up_a_request(self, engine: Engine, wanted: list[int]) -> None:
        """The answer is late, and undone."""
        channel, partition = self.take(engine)
        look_up = protocol.LookupRequest(0, partition.number, keys(*wanted))
        reserve = protocol.ReserveRequest(0, partition.number, keys(*wanted))
        with suppress(NodeError):  # it may be in time nevertheless
            found = channel.request(look_up, protocol.LookupAnswer, -1.0)
            channel.notify(protocol.ReleaseNotice(partition.number, found.slots))
        with suppress(NodeError):
            told = channel.request(reserve, protocol.ReserveAnswer, -1.0)
            channel.notify(protocol.AbortNotice(partition.number, told.slots))
        wait_until(lambda: not self._listen(channel))
        engine.client.put_back(channel)

    @rule(engine=engines)
    def settle(self, engine: Engine) -> None:
        """Once the engine is connected, the node knows exactly what it uses, or will soon."""
        channel, partition = self.take(engine)
        request = protocol.FindRequest(0, partition.number, b"", 0.0)
        channel.request(request, protocol.OutcomesAnswer, time.monotonic() + 30)
        engine.client.put_back(channel)
        used = len(engine.leases), len(engine.reserved)
        wait_until(lambda: self._uses()[engine.client._name] == used)

    def _listen(self, channel: Channel) -> bool:
        channel.hear()
        return bool(channel._requests) and channel.is_open

    @rule(engine=consumes(engines))
    def die(self, engine: Engine) -> None:
        engine.process.kill()
        engine.process.wait()
        self._forget(engine)
        for channel in engine.client._idle:
            channel._socket.close()
        name = engine.client._name
        self.node.until(lambda: name not in self._clients())

    @rule(engine=consumes(engines))
    def leave(self, engine: Engine) -> None:
        """Slots that the engine has not released are freed, too."""
        self.connecting = engine.process
        engine.client.close()
        self._forget(engine)
        name = engine.client._name
        self.node.until(lambda: name not in self._clients())
        engine.process.kill()
        engine.process.wait()

    def _clients(self) -> set[str]:
        engines = self.node.server.registry.engines.values()
        return {name for engine in engines for name in engine.clients}

    def _forget(self, engine: Engine) -> None:
        self.living.remove(engine)
        engine.leases, engine.reserved = [], {}

    # -- always ------------------------------------------------------------------------------------

    @invariant()
    def node_is_well(self) -> None:
        self.node.check()

    @invariant()
    def leased_blocks_stay_as_they_are(self) -> None:
        for engine in self.living:
            for key, slot, _ in engine.leases:
                assert self.memory(engine, slot).tobytes() == content(key), "wrong bytes"

    @invariant()
    def node_knows_what_is_in_use(self) -> None:
        """The node may count more uses than an engine has: releases that it did not receive yet."""

        found = self._uses()
        for engine in self.living:
            num_leased, num_reserved = found[engine.client._name]
            assert num_leased >= len(engine.leases)
            assert num_reserved >= len(engine.reserved)

    def _uses(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of leases and reservations of each client, as the node knows them."""

        def count() -> dict[str, tuple[int, int]]:
            return {
                name: (
                    sum(int(held.num_leases.sum()) for held in engine.partitions.values()),
                    sum(held.num_reserved for held in engine.partitions.values()),
                )
                for engine in self.node.server.registry.engines.values()
                for name in engine.clients
            }

        return self.node.do(count)

    def teardown(self) -> None:
        for engine in list(self.living):
            self.die(engine)
        for each in self.patches:
            each.stop()
        try:
            self._check_all_slots()
        finally:
            self.node.close()
            self.folder.cleanup()

    def _check_all_slots(self) -> None:
        """Nothing is in use any more, so that all slots can be had again."""
        assert self.node.num_used == 0
        if not self.node.node.partitions:
            return

        def reserve_all() -> int:
            (partition,) = self.node.node.partitions
            names = [(1000 + number).to_bytes(8, "little") for number in range(NUM_SLOTS)]
            reserved = partition.reserve(names)
            num = 0 if reserved is None else len(reserved.slots)
            partition.cache.abort(names)
            return num

        assert self.node.do(reserve_all) == NUM_SLOTS, "a slot is lost"
        self.node.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=min(settings().max_examples, 200),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
