"""Engines that may use slots of a node's arena, as the next node finds them after a crash.

Each client of an engine has a number. It maps the arena by a descriptor on which the node has
locked the byte of that number. The kernel keeps the lock as long as anybody holds the descriptor or
a mapping made of it: it ends when the client has unmapped the arena, or its process is dead. So a
node finds out about the clients of the node before, in whatever process namespace they are.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvtier.core.system.landlock import open_untruncatable
from kvtier.core.system.private_files import read_checked_file, replace_checked_file

PREFIX = "engine-"
FLOCK = struct.Struct("@hhqqi0q")
NUM_BITS = 64
SHARED_BIT = NUM_BITS - 1
"""Bit of all engines beyond the first ``SHARED_BIT``. A slot keeps it until it is freed."""
PF_EXITING = 0x4


@dataclass(frozen=True, slots=True)
class UserProcess:
    """Process of a client, as far as the node knows it.

    pid: 0 if it is in another process namespace. start: clock ticks from the system's start.
    """

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> UserProcess:
        """Return a living process by its number."""
        return cls(pid, _stat(pid)[2])

    @property
    def is_exiting(self) -> bool:
        """Whether it is about to end. Devices may still copy for it, though it maps nothing."""
        if not self.pid:
            return False
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            state, flags, start = _stat(self.pid)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            is_ending = state in ("Z", "X") or bool(flags & PF_EXITING)
            return is_ending and start == self.start and not poll.poll(0)
        finally:
            os.close(pidfd)


def _stat(pid: int) -> tuple[str, int, int]:
    """Return the state, the flags and the start of a process; zeros for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0, 0
    return fields[0], int(fields[6]), int(fields[19])


@dataclass(slots=True)
class SlotUser:
    """An engine that may use slots.

    number: unique in this arena. bit: its bit in ``PartitionRows.users``. clients: by number.
    """

    number: int
    bit: int
    name: str
    clients: dict[int, UserProcess] = field(default_factory=dict)

    @property
    def mask(self) -> int:
        """The bit as a number."""
        return 1 << self.bit

    @property
    def keeps(self) -> int:
        """Bits that stay when this engine ceases to use a slot."""
        return (1 << NUM_BITS) - 1 if self.bit == SHARED_BIT else ~self.mask & (1 << NUM_BITS) - 1


class SlotUsers:
    """Engines that may use slots, in files of ``folder``.

    Attributes:
        memory_fd: descriptor of the arena.
        left: engines of earlier nodes that may still use slots.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.memory_fd = -1
        self.left: list[SlotUser] = []
        self._bits: set[int] = set()  # in use, by one engine each
        self._num_made = 0

    def load(self) -> None:
        """Read the engines of an earlier node.

        Raises ``OSError`` or ``ValueError`` for a file that can't be read.
        """
        for path in sorted(self._folder.glob(f"{PREFIX}*")):
            if path.suffix == ".new":  # its client had not got the arena yet
                continue
            user = msgspec.json.decode(read_checked_file(path), type=SlotUser)
            self.left.append(user)
            self._bits.add(user.bit)
            self._num_made = max(self._num_made, user.number, *user.clients)

    @property
    def left_mask(self) -> int:
        """Bits of the engines of earlier nodes."""
        mask = 0
        for user in self.left:
            mask |= user.mask
        return mask

    def enter(self, name: str) -> SlotUser:
        """Return a new engine without clients. It has its bit from the first client on."""
        free = (bit for bit in range(SHARED_BIT) if bit not in self._bits)
        self._num_made += 1
        return SlotUser(self._num_made, next(free, SHARED_BIT), name)

    def add_client(self, user: SlotUser, pid: int) -> int:
        """Note a new client before it gets the arena. Return its number. Raises ``OSError``."""
        self._num_made += 1
        user.clients[self._num_made] = UserProcess.of(pid)
        try:
            self._write(user)
        except OSError:
            del user.clients[self._num_made]
            raise
        self._bits.add(user.bit)
        return self._num_made

    def remove_client(self, user: SlotUser, number: int) -> None:
        """Note that a client uses no slot any more."""
        del user.clients[number]
        if user.clients:
            with suppress(OSError):  # the next node finds out by the lock
                self._write(user)
        else:
            self._forget(user)

    def _write(self, user: SlotUser) -> None:
        content = msgspec.json.encode(user).decode()
        replace_checked_file(self._folder / f"{PREFIX}{user.number}", content)

    def _forget(self, user: SlotUser) -> None:
        (self._folder / f"{PREFIX}{user.number}").unlink(missing_ok=True)
        if user.bit != SHARED_BIT:
            self._bits.discard(user.bit)

    def open_memory(self, number: int) -> int:
        """Return a descriptor of the arena for a client; the lock of its number is on it.

        A truncated arena would end every process that touches it.
        """
        fd = open_untruncatable(f"/proc/self/fd/{self.memory_fd}")
        try:
            _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_RDLCK, number)
        except OSError:
            os.close(fd)
            raise
        return fd

    def take_ended(self) -> Iterator[SlotUser]:
        """Yield the engines of earlier nodes that use no slot any more, and forget them.

        A slot of such an engine is free before the next one is yielded.
        """
        for user in list(self.left):
            if not any(self._may_use(*client) for client in user.clients.items()):
                self.left.remove(user)
                yield user
                self._forget(user)

    def _may_use(self, number: int, process: UserProcess) -> bool:
        """Whether a client has mapped the arena, or is just ending."""
        found: bytes = _lock(self.memory_fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, number)
        return FLOCK.unpack(found)[0] != fcntl.F_UNLCK or process.is_exiting


def _lock(fd: int, call: int, kind: int, number: int) -> bytes:
    """Set a lock on the byte of a client, or return the lock that is in its way."""
    return fcntl.fcntl(fd, call, FLOCK.pack(kind, os.SEEK_SET, number, 1, 0))
