"""A node in a process of its own, and an engine that speaks to it without a client."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import Self

import numpy as np

from kvtier.node.wire import protocol
from tests.kit.nodes import NodeProcess
from tests.node.harness import Bare

BLOCK_BYTES = 64 << 10
SCOPE = b"the namespace of these tests".ljust(32, b"\0")


def key(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def hexed(*numbers: int) -> list[str]:
    return [key(number).hex() for number in numbers]


class BareEngine(Bare):
    """An engine with one connection, which has mapped the memory. Close it."""

    def __init__(self, node: NodeProcess, tenant: str = "", name: str = "engine") -> None:
        super().__init__(node.socket)
        welcome = self.attach(name, tenant)
        self._memory = mmap.mmap(self.fds[0], welcome.memory_bytes)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self.partition: int = self.open(BLOCK_BYTES, 32, SCOPE).partition

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.send(protocol.DetachNotice())
        self.close()

    # -- blocks ------------------------------------------------------------------------------------

    def block(self, slot: int) -> np.ndarray:
        return self._bytes[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES]

    def reserve(self, wanted: Sequence[bytes]) -> list[int]:
        answer = self.ask(protocol.ReserveRequest(3, self.partition, b"".join(wanted)))
        return protocol.unpack(answer.slots).tolist()

    def commit(self, slots: Sequence[int]) -> None:
        depths = protocol.pack(range(len(slots)))
        self.send(protocol.CommitNotice(self.partition, protocol.pack(slots), depths))

    def store(self, *numbers: int) -> None:
        """Store blocks, each filled with its number."""
        slots = self.reserve(keys(*numbers))
        assert len(slots) == len(numbers)
        for number, slot in zip(numbers, slots, strict=True):
            self.block(slot)[:] = number
        self.commit(slots)

    def look_up(self, *numbers: int, has_gaps: bool = False) -> protocol.LookupAnswer:
        joined = b"".join(keys(*numbers))
        found: protocol.LookupAnswer = self.ask(
            protocol.LookupRequest(4, self.partition, joined, has_gaps)
        )
        return found

    def places(self, *numbers: int) -> list[int]:
        """Return where blocks are, as in ``LookupAnswer``, once all stores have answered."""
        while True:
            answer = self.look_up(*numbers, has_gaps=True)
            self.release(answer.slots)
            if protocol.UNKNOWN not in answer.places:
                return list(answer.places)
            time.sleep(0.01)

    def lease(self, *numbers: int) -> bytes:
        """Lease blocks that are in memory. Return their slots."""
        answer = self.look_up(*numbers)
        assert list(answer.places) == [protocol.MEMORY] * len(numbers)
        return answer.slots

    def release(self, slots: bytes) -> None:
        self.send(protocol.ReleaseNotice(self.partition, slots))

    def fetch(self, *numbers: int, timeout_s: float = 10.0) -> list[int | None]:
        """Read blocks to memory. Return the number that each is filled with; None if absent."""
        joined = b"".join(keys(*numbers))
        answer = self.ask(protocol.FetchRequest(5, self.partition, joined, timeout_s))
        slots = protocol.unpack(answer.slots).tolist()
        found = [int(self.block(slot)[0]) if slot >= 0 else None for slot in slots]
        self.release(protocol.pack([slot for slot in slots if slot >= 0]))
        return found

    def promote(self, *numbers: int) -> int:
        """Begin to read blocks from storage. Return how many."""
        joined = b"".join(keys(*numbers))
        return int(self.ask(protocol.PromoteRequest(6, self.partition, joined)).num)

    def delete(self, *numbers: int) -> list[int]:
        joined = b"".join(keys(*numbers))
        return list(self.ask(protocol.DeleteRequest(7, self.partition, joined)).outcomes)
