"""An engine's process that uses blocks of a node by commands, whatever happens to the node.

``python -m tests.node.using SOCKET NAME CLIENT`` reads a command from each line of stdin, and
answers with the slots that it uses.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.node.wire import protocol
from tests.node.harness import BLOCK, Bare, keys


class UserProcess(subprocess.Popen[str]):
    """The process. slots: those that it uses, after its last command."""

    slots: list[int]

    def do(self, command: str) -> None:
        assert self.stdin is not None
        assert self.stdout is not None
        self.stdin.write(f"{command}\n")
        self.stdin.flush()
        self.slots = [*map(int, self.stdout.readline().split())]


@contextmanager
def using(
    path: Path, *commands: str, name: str = "user", client: str = ""
) -> Iterator[UserProcess]:
    """Run an engine's process until the end, and give it commands."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "tests.node.using", str(path), name, client]
    process = UserProcess(command, stdin=pipe, stdout=pipe, text=True)
    try:
        for each in ("attach", *commands):
            process.do(each)
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        for end in process.stdin, process.stdout:
            assert end is not None
            end.close()


def main() -> None:
    path, name, client = sys.argv[1:]
    engine = Bare(Path(path))
    slots: list[int] = []
    for line in sys.stdin:
        command, *numbers = line.split()
        wanted = keys(*map(int, numbers))
        match command:
            case "attach":
                num_bytes = engine.attach(name, client=client).memory_bytes
                memory = mmap.mmap(engine.fds[0], num_bytes)
                os.close(engine.fds.pop(0))
                partition = engine.open().partition
            case "reserve":
                answer = engine.ask(protocol.ReserveRequest(3, partition, wanted))
                slots = protocol.unpack(answer.slots).tolist()
            case "lease":
                answer = engine.ask(protocol.LookupRequest(3, partition, wanted))
                slots = protocol.unpack(answer.slots).tolist()
            case "write":
                for slot in slots:
                    memory[slot * BLOCK : (slot + 1) * BLOCK] = b"x" * BLOCK
            case "unmap":
                memory.close()
            case "ask":  # and leave the answer unread
                engine.send(protocol.LookupRequest(4, partition, wanted))
                engine.socket.recv(1, socket.MSG_PEEK)
            case "notify":  # more than the node receives by one call
                engine.send(protocol.UseNotice(partition, bytes(2 * protocol.RECEIVED_AT_ONCE)))
            case "close":
                engine.socket.close()
            case "fork":
                if os.fork() == 0:
                    sys.stdin.read()
                    os._exit(0)
        print(*slots, flush=True)


if __name__ == "__main__":
    main()
