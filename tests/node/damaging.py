"""Damage to the files of a killed node's memory, and an engine that was stopped meanwhile."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

from kvtier.node.server.engines import Holdings
from kvtier.node.server.records import FOLDER
from tests.node.harness import BLOCK, keys
from tests.node.test_takeover import NUM, Harness

STORED = range(20)
RESERVED = (100, 101, 102)
AFTERWARDS = range(200, 200 + NUM)
"""Blocks that the killed node has stored, that its engine was to fill, and of the next node."""


class StoppedEngine:
    """An engine that has reserved slots of a node, and fills them when it is resumed."""

    def __init__(self, here: Harness) -> None:
        users = here.node.memory.records.users
        user = users.enter("stopped")
        fd = users.open_memory(users.add_client(user, os.getpid()))
        self.inode = os.fstat(fd).st_ino
        self._memory = mmap.mmap(fd, here.node.memory.num_bytes)
        os.close(fd)
        reserved = Holdings(here.partition, user).reserve([keys(number) for number in RESERVED])
        assert reserved is not None
        self.slots = reserved[0].slots

    def is_attached_to(self, here: Harness) -> bool:
        """Whether a node has the memory that the engine writes to."""
        return os.fstat(here.node.memory.fd).st_ino == self.inode

    def resume(self) -> None:
        for slot in self.slots:
            self._memory[slot * BLOCK : (slot + 1) * BLOCK] = b"x" * BLOCK

    def close(self) -> None:
        self._memory.close()


def survive(folder: Path, damage: Callable[[Path], object]) -> bool:
    """Kill a node, damage its memory, and start the next one; it must serve right bytes.

    damage: gets the directory of the memory. Returns whether the memory was taken over.
    """
    here = Harness(folder)
    engine = StoppedEngine(here)
    try:
        here.store(*STORED)
        here.seal()
        here.kill()
        damage(here.node.config.directory)
        here.start()
        here.found(*STORED)
        is_taken_over = engine.is_attached_to(here)
        for number in AFTERWARDS:
            here.store(number)
        if is_taken_over:
            engine.resume()
        num_free = NUM - (len(engine.slots) if is_taken_over else 0)
        num_found = len(here.found(*STORED, *AFTERWARDS))
        assert num_found <= num_free
        assert is_taken_over or num_found == NUM, "new memory can be used as a whole"
        return is_taken_over
    finally:
        engine.close()
        for node in here.made:
            node.close()


def files_of(directory: Path) -> list[Path]:
    """Return the files of a node's memory."""
    paths = (*directory.iterdir(), *(directory / FOLDER).iterdir())
    return sorted(path for path in paths if path.is_file())


def change_bytes(path: Path, rng: random.Random) -> None:
    """Change some bytes of a file in place, as faulty memory does."""
    size = path.stat().st_size
    if not size:
        return
    at = rng.randrange(size)
    num = min(size - at, rng.choice((1, 8, 64, 4096, size)))
    with path.open("r+b") as file:
        file.seek(at)
        before = file.read(num)
        flipped = bytes([before[0] ^ 1 << rng.randrange(8)]) + before[1:]
        file.seek(at)
        file.write(rng.choice((flipped, flipped, bytes(num), b"\xff" * num, rng.randbytes(num))))


def resize(path: Path, rng: random.Random) -> None:
    """Cut a file off, or let it grow."""
    size = path.stat().st_size
    os.truncate(path, rng.choice((0, 1, size // 2, max(0, size - 1), size + 1, 2 * size + 1)))


def rewrite(path: Path, rng: random.Random) -> None:
    """Give a file another content."""
    texts = (b"", b"[]", b"{}", b"[" * 100_000, b'{"format": 1e999}', b"null", b"\xff\xfe", b"1")
    path.write_bytes(rng.choice(texts))


def replace_by_link(path: Path, rng: random.Random) -> None:
    """Put a link in a file's place: to itself, nowhere, or to a file that must stay as it is."""
    path.unlink()
    path.symlink_to(rng.choice((path, path.parent / "nowhere", Path("/dev/zero"))))


def replace_by_another(path: Path, rng: random.Random) -> None:
    """Put something in a file's place that is no file."""
    path.unlink()
    if rng.random() < 0.5:
        os.mkfifo(path)
    else:
        (path / "directory").mkdir(parents=True)


DAMAGES = (change_bytes, resize, rewrite, replace_by_link, replace_by_another)
