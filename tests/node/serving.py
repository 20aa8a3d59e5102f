"""Serves a node until it is ended: ``python -m tests.node.serving FOLDER [NAME=VALUE ...]``."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path

from kvtier.devices.cpu import CpuDevice
from kvtier.node.server.node import CacheNode
from kvtier.node.server.server import NodeServer
from tests.node.harness import config_of


async def serve(server: NodeServer) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    print("ready", flush=True)
    with suppress(asyncio.CancelledError):
        await server.serve()


def main() -> None:
    folder, *options = sys.argv[1:]
    config = config_of(Path(folder), **dict(option.split("=", 1) for option in options))
    node = CacheNode(config, CpuDevice())
    try:
        asyncio.run(serve(NodeServer(node, config.socket)))
    finally:
        node.close()


if __name__ == "__main__":
    main()
