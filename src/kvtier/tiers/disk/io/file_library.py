"""ctypes bindings of vendors' libraries that move bytes between files and accelerator memory.

NVIDIA's cuFile, AMD's hipFile and Ascend's NDS have the same calls with different prefixes. Calls
of each vendor, and the replacements of missing ones:

    call                              cuFile      hipFile   NDS
    DriverOpen, DriverClose           yes         yes       yes
    HandleRegister, HandleDeregister  yes         yes       yes
    Read, Write                       yes         yes       yes
    BufRegister, BufDeregister        yes         yes       no: not needed
    Readv, Writev                     from 1.20   no        no: a batch, or one call per piece
    BatchIO*                          yes         not used  no: one call per piece
    SetParameterPosixPoolSlabArray    from 1.15   no        no: smaller batches
    SetParameterBool                  from 1.14   no        no: environment variables

Loading a library is harmless. Opening its driver may not be: cuFile 1.15 and 1.20 spin forever on a
kernel without ``/proc/modules``. So ``probe`` tries that in a separate process first.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sysconfig
import threading
from collections.abc import Callable
from ctypes import Structure, Union, byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvtier.devices.library import Call, Library

ALREADY_OPEN: Final = 5026

ALLOW_COMPAT: Final = 1
FORCE_COMPAT: Final = 2
"""Parameters of ``SetParameterBool``, in the order of ``Vendor.compat``."""

MEANINGS: Final = {
    5001: "its kernel driver is not loaded, or not open",
    5004: "library and kernel module are of different versions",
    5007: "not on this platform",
    5008: "not on this file system",
    5009: "not with this accelerator",
    5011: "the accelerator's driver refused",
    5012: "not an address of the accelerator",
    5013: "memory that the library can't access",
    5014: "beyond the end of the memory",
    5015: "memory of another context",
    5016: "more memory than may be pinned",
    5018: "not a regular file",
    5019: "the open mode of the file is not supported",
    5020: "the file was opened without O_DIRECT",
    5022: "wrong arguments",
    5023: "the memory is registered already",
    5024: "the memory is not registered",
    5025: "not permitted",
    5026: "the driver is open already",
    5027: "the file is not registered; does udev's database in /run/udev have its disk?",
    5028: "the file is registered already",
    5029: "no accelerator",
    5030: "an error inside the library",
    5033: "the driver can't be set up; is the accelerator's driver installed?",
    5034: "switched off by its configuration",
    5036: "the memory can't be pinned; is there room in the accelerator's BAR?",
    5037: "the batch is full",
    5043: "the library has no memory left",
}
"""Meanings of the error codes, shared by all three libraries, that an operator can act on."""

ERRNOS: Final = {
    5012: errno.EFAULT,
    5013: errno.EFAULT,
    5014: errno.EFAULT,
    5022: errno.EINVAL,
    5024: errno.EFAULT,
    5025: errno.EACCES,
    5027: errno.EBADF,
    5043: errno.ENOMEM,
}
"""errno for each error code of a transfer. Other codes become EIO."""

_LAST_ERRNO: Final = 4095


class FileStatus(Structure):
    """Status that calls return by value: the library's code, and the accelerator driver's."""

    _fields_ = (("code", c_int), ("driver_code", c_int))


class FileName(Union):
    """Name of a file: a descriptor of the operating system, or a pointer."""

    _fields_ = (("fd", c_int), ("pointer", c_void_p))


class FileDescriptor(Structure):
    """Description of a file. With kind ``OF_SYSTEM`` the name is an OS descriptor."""

    _fields_ = (("kind", c_int), ("name", FileName), ("operations", c_void_p))


class Vector(Structure):
    """One piece of memory in ``Readv`` and ``Writev``."""

    _fields_ = (("address", c_void_p), ("num_bytes", c_size_t))


OF_SYSTEM: Final = 1
UNKNOWN: Final = (0, 0)
"""Version of a library that does not report one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that the driver reports; 0 if it reports none.

    max_batch: maximum requests in a batch. max_pinned_bytes: maximum bytes of registered memory.
    """

    max_batch: int = 0
    max_pinned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Vendor:
    """Description of a vendor's file library.

    name: name of the library.
    device: plug-in of the device whose memory it reaches.
    prefix: prefix of its calls.
    files: file names of the library, in the order in which they are tried.
    override: environment variable that names another file.
    calls: calls to bind.
    descriptor: converts an fd into the argument of ``HandleRegister``.
    wheel: glob pattern of the library below site-packages.
    version: returns (major, minor), or ``UNKNOWN``.
    properties: structure that ``DriverGetProperties`` fills, with sizes in KiB; None without one.
    compat: environment variables that allow, and that force, its path through host memory.
    log: environment variable that names its log file; by default it logs to the current folder.
    """

    name: str
    device: str
    prefix: str
    files: tuple[str, ...]
    override: str
    calls: tuple[Call, ...]
    descriptor: Callable[[int], Structure]
    wheel: str = ""
    version: Callable[[FileLibrary], tuple[int, int]] = lambda library: UNKNOWN
    properties: type[Structure] | None = None
    compat: tuple[str, str] | None = None
    log: str = ""

    def variables(self, may_bounce: bool, log: str = os.devnull) -> dict[str, str]:
        """Return the environment variables to set when the driver opens.

        may_bounce: allow its path through host memory. False forbids it, so that transfers are
        really direct.
        log: its log file, unless the environment names one.
        """
        made = {}
        if self.log and self.log not in os.environ:
            made[self.log] = log
        if self.compat is not None:
            allow, force = self.compat
            made |= {allow: "true"} if may_bounce else {allow: "false", force: "false"}
        return made


@dataclass(slots=True)
class _Opened:
    """A driver that is open in this process.

    is_ours: whether kvtier opened it. has_bounce_pool: whether its bounce buffers could be set.
    memory: (bytes, users) of each registration by start address.
    """

    is_ours: bool
    has_bounce_pool: bool
    num_users: int = 0
    memory: dict[int, tuple[int, int]] = field(default_factory=dict)


_lock = threading.Lock()
_opened: dict[tuple[int, str], _Opened] = {}
"""Open drivers by (process id, library path). A forked child has none of its parent's drivers."""


class FileLibrary:
    """A loaded file library of a vendor.

    Raises ``DeviceError`` if the library is missing, and from each call that fails.
    """

    def __init__(self, vendor: Vendor) -> None:
        self.vendor = vendor
        names = (*vendor.files, *map(str, _in_wheels(vendor.wheel)))
        self._library = Library(names, vendor.override, vendor.calls, _meaning)
        for name in ("Read", "Write", "Readv", "Writev"):
            if self.has(name):
                self._keep_errno(vendor.prefix + name)
        self.version = vendor.version(self)

    @property
    def path(self) -> str:
        """Path of the loaded library."""
        return self._library.path

    def __str__(self) -> str:
        name = self.vendor.name
        return name if self.version == UNKNOWN else f"{name} {'.'.join(map(str, self.version))}"

    def has(self, name: str) -> bool:
        """Return whether the library has the call ``name``, given without the prefix."""
        return self._library.has(self.vendor.prefix + name)

    def code(self, name: str, *arguments: object) -> int:
        """Call ``name``, and return its status code; 0 for success."""
        status: Any = self._library.function(self.vendor.prefix + name)(*arguments)
        return int(status.code)

    def check(self, name: str, *arguments: object) -> None:
        """Call ``name``, and raise ``DriverError`` unless it succeeds."""
        self._library.check(self.vendor.prefix + name, self.code(name, *arguments))

    def tell(self, name: str, *arguments: object) -> None:
        """Call ``name``, which returns nothing."""
        self._library.function(self.vendor.prefix + name)(*arguments)

    # -- the driver, shared by all users in the process -------------------------------------------

    def open(self, bounce_pool: tuple[tuple[int, int], ...] = ()) -> bool:
        """Open the driver, or share the open one. Return whether ``bounce_pool`` could be set.

        bounce_pool: (KiB, number) of the buffers for the path through host memory. They can be set
        only before the driver opens.
        """
        with _lock:
            opened = _opened.get(self._key)
            if opened is None:
                has_pool = self._set_bounce_pool(bounce_pool)
                self._set_compat()
                code = self.code("DriverOpen")
                if code != ALREADY_OPEN:
                    self._library.check(f"{self.vendor.prefix}DriverOpen", code)
                opened = _Opened(code != ALREADY_OPEN, has_pool)
                _opened[self._key] = opened
            opened.num_users += 1
            return opened.has_bounce_pool

    def close(self) -> None:
        """Release the driver. The last user closes it, if kvtier opened it."""
        with _lock:
            opened = _opened[self._key]
            opened.num_users -= 1
            if opened.num_users:
                return
            del _opened[self._key]
            if opened.is_ours:
                self.check("DriverClose_v2" if self.has("DriverClose_v2") else "DriverClose")

    def limits(self) -> Limits:
        """Return the limits of the open driver."""
        if self.vendor.properties is None:
            return Limits()
        found: Any = self.vendor.properties()
        if self.code("DriverGetProperties", byref(found)):
            return Limits()
        return Limits(found.max_batch, found.max_pinned << 10)

    @property
    def _key(self) -> tuple[int, str]:
        return os.getpid(), self.path

    def _set_bounce_pool(self, pool: tuple[tuple[int, int], ...]) -> bool:
        if not pool or not self.has("SetParameterPosixPoolSlabArray"):
            return False
        sizes, counts = ((c_size_t * len(pool))(*column) for column in zip(*pool, strict=True))
        return not self.code("SetParameterPosixPoolSlabArray", sizes, counts, len(pool))

    def _set_compat(self) -> None:
        """Set what ``Vendor.variables`` says of the path through host memory by call.

        cuFile 1.20 no longer reads CUFILE_ALLOW_COMPAT_MODE. A driver that somebody else has opened
        stays as it is.
        """
        if self.vendor.compat is None or not self.has("SetParameterBool"):
            return
        for variable, parameter in zip(
            self.vendor.compat, (ALLOW_COMPAT, FORCE_COMPAT), strict=True
        ):
            value = os.environ.get(variable, "")
            if value in ("true", "false"):
                code = self.code("SetParameterBool", parameter, value == "true")
                if code != ALREADY_OPEN:
                    self._library.check(f"{self.vendor.prefix}SetParameterBool", code)

    # -- files and memory -------------------------------------------------------------------------

    def register_file(self, fd: int) -> int:
        """Register a file, which must stay open, and return its handle."""
        handle, descriptor = c_void_p(), self.vendor.descriptor(fd)
        self.check("HandleRegister", byref(handle), byref(descriptor))
        return handle.value or 0

    def deregister_file(self, handle: int) -> None:
        self.tell("HandleDeregister", handle)

    def register_memory(self, address: int, nbytes: int) -> None:
        """Register memory. Engines that register the same range share one registration."""
        if not self.has("BufRegister"):
            return
        with _lock:
            memory = _opened[self._key].memory
            known, num_users = memory.get(address, (0, 0))
            if known != nbytes:
                self.check("BufRegister", address, nbytes, 0)
            memory[address] = nbytes, num_users + 1

    def deregister_memory(self, address: int) -> None:
        """Release a registration. The last user deregisters the memory."""
        if not self.has("BufDeregister"):
            return
        with _lock:
            memory = _opened[self._key].memory
            nbytes, num_users = memory.pop(address)
            if num_users > 1:
                memory[address] = nbytes, num_users - 1
            else:
                self.check("BufDeregister", address)

    # -- synchronous transfers --------------------------------------------------------------------

    def move(
        self, write: bool, handle: int, base: int, address: int, size: int, offset: int
    ) -> int:
        """Move one piece between the file at ``offset`` and accelerator memory.

        base: start of the registration that holds the piece.

        Returns the bytes moved, or -errno.
        """
        base = base if self.has("BufRegister") else address
        name = "Write" if write else "Read"
        return self._transfer(name, size, handle, base, size, offset, address - base)

    def move_vectors(
        self, write: bool, handle: int, vectors: ctypes.Array[Vector], size: int, offset: int
    ) -> int:
        """Move pieces that are neighbours in the file, of ``size`` bytes together; see ``move``."""
        name = "Writev" if write else "Readv"
        return self._transfer(name, size, handle, vectors, len(vectors), offset, 0)

    def _transfer(self, name: str, size: int, *arguments: object) -> int:
        ctypes.set_errno(0)
        done = self._library.function(self.vendor.prefix + name)(*arguments)
        return outcome(done, size, ctypes.get_errno())

    def _keep_errno(self, name: str) -> None:
        """Bind a call again, such that ``ctypes.get_errno`` returns its errno."""
        function: Any = self._library.function(name)
        kind = ctypes.CFUNCTYPE(function.restype, *function.argtypes, use_errno=True)
        call = Call(name, function.argtypes, returns=function.restype)
        self._library.bind(call, kind(ctypes.cast(function, c_void_p).value or 0))


def outcome(done: int, size: int, left_errno: int = 0) -> int:
    """Convert the return value of a transfer of ``size`` bytes to bytes or -errno.

    More bytes than requested are an error, because it is unknown what was moved. cuFile returns its
    own codes, or -1 and leaves them in errno.
    """
    if done >= 0:
        return done if done <= size else -errno.EIO
    if done == -1 and left_errno <= _LAST_ERRNO:
        return -(left_errno or errno.EIO)
    done = -left_errno if done == -1 else done
    return -ERRNOS.get(-done, -done if -done <= _LAST_ERRNO else errno.EIO)


def _meaning(library: Library, code: int) -> str:
    del library
    return MEANINGS.get(code, "unknown error")


def _in_wheels(pattern: str) -> list[Path]:
    """Return the libraries in Python packages that match a pattern, in descending name order."""
    site = Path(sysconfig.get_paths()["purelib"])
    return sorted(site.glob(pattern), reverse=True) if pattern else []
