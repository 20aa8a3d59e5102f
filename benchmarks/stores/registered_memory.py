"""Stores whose own client moves blocks into and out of memory that is registered with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import local
from typing import Any

from benchmarks.stores.servers import DEAD, Client, Memory, Place
from kvtier.core.errors import install_command
from kvtier.core.types import BlockKey
from tests.kit.servers import MooncakeMaster, has_mooncake

LENT_BYTES = 2 << 30
CALLED = 256
"""Objects per call. Mooncake's client refused some of 2,048 that were in flight at a time."""
LEASE_MS = 5000
"""Mooncake's default. Objects whose read takes longer are not read."""


class Mooncake(Client):
    """Mooncake's own client, which moves blocks directly into and out of their memory.

    ``deliver`` has nothing to do. All threads share one client, as it is meant to be used.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address)
        assert code == 0, f"Mooncake's client says {code}"
        self._known: set[int] = set()

    def _call(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> tuple[Any, ...]:
        address, size = memory.blocks.ctypes.data, memory.block_bytes
        if address not in self._known:
            self._known.add(address)
            assert self._store.register_buffer(address, memory.blocks.nbytes) == 0
        begins = [address + place * size for place in range(at.start, at.stop)]
        return [f"client:{key.hex()}" for key in keys], begins, [size] * len(keys)

    def put(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None:
        for part in _parts(at):
            some = keys[part.start - at.start : part.stop - at.start]
            codes = self._store.batch_put_from(*self._call(some, memory, part))
            assert not any(codes), f"an object was not stored: {set(codes)}"

    def get(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None:
        for part in _parts(at):
            some = keys[part.start - at.start : part.stop - at.start]
            found = self._store.batch_get_into(*self._call(some, memory, part))
            assert set(found) == {memory.block_bytes}, f"an object was not loaded: {set(found)}"

    def drop(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._store.remove(f"client:{key.hex()}", True)

    def close(self) -> None:
        self._store.close()


def _parts(at: slice) -> list[slice]:
    """Return the parts of a slice, one per call."""
    starts = range(at.start, at.stop, CALLED)
    return [slice(start, min(start + CALLED, at.stop)) for start in starts]


class MooncakePlace(Place):
    """A Mooncake master, and a process that lends it memory.

    While the client is set up no other Python thread runs, not even those of a proxy.
    """

    name, client_name = "mooncake", "mooncake"
    packages = ("mooncake-transfer-engine-non-cuda",)
    is_far = False
    troubles = (DEAD,)

    @classmethod
    def missing(cls) -> str | None:
        return None if has_mooncake() else install_command("mooncake")

    def __init__(self, folder: Path) -> None:
        self._master = MooncakeMaster(folder, LENT_BYTES, LEASE_MS)

    @property
    def port(self) -> int:
        return self._master.port

    def location(self, port: int, threads: int) -> str:
        return f"mooncake://127.0.0.1:{port}?readers={threads}&writers={threads}"

    @contextmanager
    def way(self) -> Iterator[tuple[int, Callable[[str], AbstractContextManager[None]]]]:
        """Stop the store's processes, which keep their connections. No proxy is needed."""
        yield self.port, lambda trouble: self._master.frozen()

    def client(self, threads: int) -> Client:
        return Mooncake(self._master.address)

    def close(self) -> None:
        self._master.close()


class Nixl(Client):
    """NIXL's POSIX plug-in: a file per block, O_DIRECT, read and written without a buffer.

    Each call is one transfer, and each thread has an agent.
    """

    def __init__(self, folder: Path, params: dict[str, str]) -> None:
        super().__init__()
        self._folder, self._params = folder, params
        folder.mkdir(exist_ok=True)
        self._local = local()

    def _agent(self, memory: Memory) -> Any:
        if not hasattr(self._local, "agent"):
            from nixl import nixl_agent, nixl_agent_config

            agent = nixl_agent(os.urandom(8).hex(), nixl_agent_config(backends=[]))
            agent.create_backend("POSIX", self._params)
            agent.register_memory(
                [(memory.blocks.ctypes.data, memory.blocks.nbytes, 0, "")], "DRAM"
            )
            self._local.agent = agent
        return self._local.agent

    def _move(self, operation: str, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None:
        agent, size = self._agent(memory), memory.block_bytes
        flags = os.O_DIRECT | (os.O_CREAT | os.O_WRONLY if operation == "WRITE" else os.O_RDONLY)
        files = [os.open(self._folder / key.hex(), flags, 0o600) for key in keys]
        values = agent.register_memory([(0, size, file, "") for file in files], "FILE")
        begin = memory.blocks.ctypes.data
        here = [(begin + place * size, size, 0) for place in range(at.start, at.stop)]
        handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs(here, "DRAM"),
            agent.get_xfer_descs([(0, size, file) for file in files], "FILE"),
            agent.name,
        )
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(1e-4)
            state = agent.check_xfer_state(handle)
        assert state == "DONE", "a transfer failed"
        handle.release()
        agent.deregister_memory(values)
        for file in files:
            os.close(file)

    def put(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None:
        self._move("WRITE", keys, memory, at)

    def get(self, keys: Sequence[BlockKey], memory: Memory, at: slice) -> None:
        self._move("READ", keys, memory, at)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            (self._folder / key.hex()).unlink()

    def close(self) -> None:
        """Agents end with their threads."""


class NixlPlace(Place):
    """NIXL's plug-in for files, in a folder, with NIXL's default queue."""

    name, client_name = "nixl", "nixl"
    packages = ("nixl",)
    port = 0
    is_far = False
    troubles = ()

    @classmethod
    def missing(cls) -> str | None:
        return None if find_spec("nixl") else install_command("nixl")

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def location(self, port: int, threads: int) -> str:
        return f"nixl://POSIX{self._folder}/tier?readers={threads}&writers={threads}"

    def client(self, threads: int) -> Client:
        return Nixl(self._folder / "client", {})

    def close(self) -> None:
        """Nothing runs."""
