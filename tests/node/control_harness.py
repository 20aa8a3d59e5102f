"""A node in a process of its own, and an engine that speaks to it without a client."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from kvtier.node.wire import protocol
from tests.kit.nodes import NodeProcess

BLOCK_BYTES = 64 << 10
SCOPE = b"the namespace of these tests".ljust(32, b"\0")


def key(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def hexed(*numbers: int) -> list[str]:
    return [key(number).hex() for number in numbers]


class BareEngine:
    """One connection of an engine, by messages of the protocol. Close it."""

    def __init__(self, node: NodeProcess, tenant: str = "", name: str = "engine") -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(30.0)
        self._socket.connect(str(node.socket))
        self._frames = protocol.Frames()
        self._fds: list[int] = []
        self._num = 0
        version = protocol.VERSION
        welcome = self.ask(lambda number: protocol.AttachRequest(number, version, name, tenant))
        fd = self._fds.pop()
        self._memory = mmap.mmap(fd, welcome.memory_bytes)
        os.close(fd)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        opened = self.ask(lambda number: protocol.OpenRequest(number, SCOPE, BLOCK_BYTES, 32))
        os.close(self._fds.pop())
        self.partition = opened.partition

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.tell(protocol.DetachNotice())
        self._socket.close()

    def tell(self, notice: protocol.FromEngine) -> None:
        self._socket.sendall(protocol.frame(notice))

    def ask(self, make: Callable[[int], protocol.FromEngine]) -> Any:
        self._num += 1
        self.tell(make(self._num))
        while True:
            num, fds = protocol.receive(self._socket, self._frames)
            assert num, "the node closed the connection"
            self._fds += fds
            while (content := self._frames.next()) is not None:
                answer = protocol.decode_node(content)
                if getattr(answer, "id", None) == self._num:
                    return answer

    # -- blocks ------------------------------------------------------------------------------------

    def block(self, slot: int) -> np.ndarray:
        return self._bytes[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES]

    def reserve(self, wanted: Sequence[bytes]) -> list[int]:
        answer = self.ask(
            lambda number: protocol.ReserveRequest(number, self.partition, b"".join(wanted))
        )
        return protocol.unpack(answer.slots).tolist()

    def commit(self, slots: Sequence[int]) -> None:
        depths = protocol.pack(range(len(slots)))
        self.tell(protocol.CommitNotice(self.partition, protocol.pack(slots), depths))

    def store(self, *numbers: int) -> None:
        """Store blocks, each filled with its number."""
        slots = self.reserve(keys(*numbers))
        assert len(slots) == len(numbers)
        for number, slot in zip(numbers, slots, strict=True):
            self.block(slot)[:] = number
        self.commit(slots)

    def places(self, *numbers: int) -> list[int]:
        """Return where blocks are, as in ``LookupAnswer``, once all stores have answered."""
        while True:
            answer = self.ask(
                lambda number: protocol.LookupRequest(
                    number, self.partition, b"".join(keys(*numbers)), has_gaps=True
                )
            )
            self.release(answer.slots)
            if protocol.UNKNOWN not in answer.places:
                return list(answer.places)
            time.sleep(0.01)

    def lease(self, *numbers: int) -> bytes:
        """Lease blocks that are in memory. Return their slots."""
        answer = self.ask(
            lambda number: protocol.LookupRequest(number, self.partition, b"".join(keys(*numbers)))
        )
        assert list(answer.places) == [protocol.MEMORY] * len(numbers)
        found: bytes = answer.slots
        return found

    def release(self, slots: bytes) -> None:
        self.tell(protocol.ReleaseNotice(self.partition, slots))

    def fetch(self, *numbers: int, timeout_s: float = 10.0) -> list[int | None]:
        """Read blocks to memory. Return the number that each is filled with; None if absent."""
        answer = self.ask(
            lambda number: protocol.FetchRequest(
                number, self.partition, b"".join(keys(*numbers)), timeout_s
            )
        )
        slots = protocol.unpack(answer.slots).tolist()
        found = [int(self.block(slot)[0]) if slot >= 0 else None for slot in slots]
        there = [slot for slot in slots if slot >= 0]
        self.release(protocol.pack(there))
        return found

    def promote(self, *numbers: int) -> int:
        """Begin to read blocks from storage. Return how many."""
        answer = self.ask(
            lambda number: protocol.PromoteRequest(number, self.partition, b"".join(keys(*numbers)))
        )
        found: int = answer.num
        return found

    def delete(self, *numbers: int) -> list[int]:
        answer = self.ask(
            lambda number: protocol.DeleteRequest(number, self.partition, b"".join(keys(*numbers)))
        )
        return list(answer.outcomes)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    ends_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends_s, what
        time.sleep(0.02)
