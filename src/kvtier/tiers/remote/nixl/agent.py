"""One NIXL plug-in and its transfers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final
from uuid import uuid4

from nixl import nixl_agent, nixl_agent_config

from kvtier.tiers.remote.bounce_workers import BounceRows
from kvtier.tiers.remote.errors import Unreachable

FIRST_PAUSE_S: Final = 20e-6
LONGEST_PAUSE_S: Final = 1e-3
"""Pauses between polls of a transfer: NIXL does not notify of its end."""
READ, WRITE = "READ", "WRITE"

Place = int
"""Descriptor of an open file."""
Part = tuple[int, int, Place]
"""Address, size in bytes, and the file whose first bytes they are."""

logger = logging.getLogger(__name__)
if "NIXL_LOG_LEVEL" not in os.environ:
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to the standard output


def _agent() -> Any:
    """Return an agent without a plug-in."""
    return nixl_agent(uuid4().hex, nixl_agent_config(enable_prog_thread=False, backends=[]))


def memory_kinds(plugin: str) -> frozenset[str]:
    """Return the kinds of memory that a plug-in moves, by NIXL's names: FILE, OBJ ...

    Nothing if there is no such plug-in, or it cannot be loaded here.
    """
    agent = _agent()
    if plugin not in agent.get_plugin_list():
        return frozenset()
    return frozenset(kind.removesuffix("_SEG") for kind in agent.get_plugin_mem_types(plugin))


class Agent:
    """Moves bytes between rows and files. Used by one thread."""

    def __init__(self, plugin: str, params: dict[str, str], rows: BounceRows) -> None:
        self.plugin = plugin
        self._agent = _agent()
        memory = rows.memory
        try:
            self._agent.create_backend(plugin, params)
            self._rows = self._register([(memory.address, memory.nbytes, 0, "")], "DRAM")
        except Exception as error:  # NIXL's errors have no common base
            raise Unreachable(f"the plug-in {plugin} does not begin ({_words(error)})") from error

    def _register(self, places: Sequence[tuple[int, int, int, str]], kind: str) -> Any:
        return self._agent.register_memory(list(places), kind, [self.plugin])

    def move(self, operation: str, transfers: Sequence[Sequence[Part]]) -> list[bool]:
        """Run transfers concurrently. Return which of them moved all of their parts.

        Parts of a failed transfer may stay in flight until ``close``.
        """
        sizes: dict[Place, int] = {}  # largest size per file: a file may occur twice
        for _, size, place in (part for transfer in transfers for part in transfer):
            sizes[place] = max(size, sizes.get(place, 0))
        if not sizes:
            return [True] * len(transfers)
        try:
            files = self._register([(0, size, place, "") for place, size in sizes.items()], "FILE")
        except Exception as error:
            logger.debug("not registered plugin=%s reason=%r", self.plugin, _words(error))
            return [False] * len(transfers)
        begun: list[Any] = []
        try:
            begun += [self._begin(operation, transfer) for transfer in transfers]
            return [self._has_moved(handle) for handle in begun]
        finally:
            for handle in begun:
                with suppress(Exception):
                    handle.release()
            with suppress(Exception):
                self._agent.deregister_memory(files, [self.plugin])

    def _begin(self, operation: str, parts: Sequence[Part]) -> Any:
        """Begin a transfer. Return None if it was refused."""
        agent = self._agent
        here = agent.get_xfer_descs([(address, size, 0) for address, size, _ in parts], "DRAM")
        there = agent.get_xfer_descs([(0, size, place) for _, size, place in parts], "FILE")
        handle: Any = None
        try:
            handle = agent.initialize_xfer(operation, here, there, agent.name, b"", [self.plugin])
            agent.transfer(handle)
        except Exception as error:
            logger.debug("refused plugin=%s reason=%r", self.plugin, _words(error))
            with suppress(Exception):
                handle.release()
            return None
        return handle

    def _has_moved(self, handle: Any) -> bool:
        if handle is None:
            return False
        pause_s = FIRST_PAUSE_S
        try:
            while (state := self._agent.check_xfer_state(handle)) == "PROC":
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        except Exception as error:
            logger.debug("failed plugin=%s reason=%r", self.plugin, _words(error))
            return False
        return bool(state == "DONE")

    def close(self) -> None:
        """Close the agent and end the transfers in flight."""
        with suppress(Exception):
            self._agent.deregister_memory(self._rows, [self.plugin])
        del self._agent, self._rows


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
