"""Fake driver libraries of accelerators: built from C++, and controlled by tests."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_int, c_long, c_size_t, c_uint, c_void_p
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

Bytes = npt.NDArray[np.uint8]

HERE = Path(__file__).parent
CORE = ("machine", "memory", "control")
VARIANTS = {
    "cuda122": ("cuda", 12020),
    "cuda128": ("cuda", 12080),
    "cuda130": ("cuda", 13000),
    "cann83": ("ascend", 803),
    "cann85": ("ascend", 805),
    "cann91": ("ascend", 901),
    "hip70": ("hip", 70000000),
    "hip72": ("hip", 70200000),
    "hip713": ("hip", 71300000),
}
"""Per variant the vendor, and the version that decides which calls there are."""

ARGUMENTS = {
    "fake_reset": (c_uint, c_int, c_int),
    "fake_hold": (c_int,),
    "fake_fail_call": (c_char_p, c_int, c_int),
    "fake_fail_entry": (c_int, c_size_t, c_int),
    "fake_fail_late": (c_int, c_int),
    "fake_lose_device": (c_int,),
    "fake_feature": (c_int,),
    "fake_allocate": (c_size_t, c_int),
    "fake_free": (c_void_p,),
    "fake_adopt": (c_void_p, c_size_t, c_int),
    "fake_disown": (c_void_p,),
    "fake_cut": (c_void_p,),
    "fake_peek": (c_void_p, c_void_p, c_size_t),
    "fake_poke": (c_void_p, c_void_p, c_size_t),
    "fake_compute_stream": (c_int,),
    "fake_fill": (c_void_p, c_size_t, c_int, c_void_p),
    "fake_wait_for": (c_void_p,),
    "fake_count": (c_char_p,),
    "fake_num_pending": (),
    "fake_violations": (c_char_p, c_size_t),
    "fake_leaks": (c_char_p, c_size_t),
}
POINTERS = ("fake_allocate", "fake_compute_stream")
COUNTS = (
    "fake_count", "fake_num_pending", "fake_violations", "fake_leaks", "fake_storage_num_moving",
    "fake_storage_num_transfers", "fake_storage_leaks",
)  # fmt: skip


@cache
def _folder() -> Path:
    """Return the folder of what was built from these sources, for later runs."""
    sources = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.hpp"), Path(__file__)])
    content = blake2b(b"".join(path.read_bytes() for path in sources), digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"kvtier-fakes-{os.getuid()}-{content}"
    folder.mkdir(exist_ok=True)
    return folder


@cache
def build(variant: str, *flags: str) -> Path:
    """Return the shared library of ``variant``, compiled once. Skip the test without a compiler."""
    vendor, version = VARIANTS[variant]
    return link(f"{variant}{''.join(flags)}", [(vendor, version)], flags)


def link(name: str, parts: Sequence[tuple[str, int]], flags: tuple[str, ...] = ()) -> Path:
    """A shared library of these parts, each a file and its version, over the machine."""
    files = [*((file, 0) for file in CORE), *parts]
    objects = [_compile(f"{file}.cpp", version, flags) for file, version in files]
    library = _folder() / f"{name}.so"
    if not library.exists():
        _run("-shared", *flags, *map(str, objects), "-lpthread", to=library)
    return library


def _compile(file: str, version: int, flags: tuple[str, ...]) -> Path:
    """An object file; one that many variants share is made once."""
    made = _folder() / f"{file}-{version}{''.join(flags)}.o"
    if not made.exists():
        wanted = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC"]
        wanted += ["-fvisibility=hidden", f"-DVERSION={version}", *flags]
        _run(*wanted, "-c", str(HERE / file), to=made)
    return made


def _run(*arguments: str, to: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        if os.environ.get("KVTIER_REQUIRE_NATIVE") == "1":
            pytest.fail("a compiler is wanted, but there is none")
        pytest.skip("no C++ compiler to build the fake driver with")
    half_done = to.with_suffix(f".{os.getpid()}")
    done = subprocess.run(
        [compiler, *arguments, "-o", str(half_done)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    half_done.replace(to)


class Fake:
    """One variant: controls for tests, and records of calls. The product loads ``path``, too."""

    def __init__(self, variant: str, path: Path | None = None) -> None:
        self.variant = variant
        self.vendor, self.version = VARIANTS[variant]
        self.path = path or build(variant)
        self._library = ctypes.CDLL(str(self.path))
        self._declare(ARGUMENTS)
        self.reset()

    def _declare(self, calls: Mapping[str, tuple[Any, ...]]) -> None:
        for name, arguments in calls.items():
            function = getattr(self._library, name)
            function.argtypes = arguments
            function.restype = c_long if name in COUNTS else c_int
            if name in POINTERS:
                function.restype = c_void_p

    @property
    def library(self) -> ctypes.CDLL:
        """Return the library, for calls like the product's."""
        return self._library

    def reset(self, seed: int = 0, late_reads: bool = False, max_delay_us: int = 0) -> None:
        """Reset to a new machine. late_reads: read a batch's arrays again when the batch runs."""
        self._library.fake_reset(seed, late_reads, max_delay_us)

    # -- faults -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """Hold all streams until ``release``."""
        self._library.fake_hold(1)

    def release(self) -> None:
        self._library.fake_hold(0)

    def fail_call(self, name: str, code: int, nth: int = 1) -> None:
        """The ``nth`` call from now returns ``code`` and does nothing."""
        self._library.fake_fail_call(name.encode(), nth, code)

    def fail_entry(self, entry: int, code: int, nth_batch: int = 1) -> None:
        """The ``nth`` batch from now fails at ``entry``; the entries before it are in flight."""
        self._library.fake_fail_entry(nth_batch, entry, code)

    def fail_late(self, code: int, nth_copy: int = 1) -> None:
        """A copy fails when it runs; every later wait and query returns ``code``."""
        self._library.fake_fail_late(nth_copy, code)

    def lose_device(self, code: int) -> None:
        """Every later call returns ``code``."""
        self._library.fake_lose_device(code)

    def refuse_batches(self) -> None:
        """The batch call exists, and reports that the machine does not support it."""
        self._library.fake_feature(1)

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, device: int = 0) -> int:
        address: int | None = self._library.fake_allocate(nbytes, device)
        assert address, f"no {nbytes} bytes"
        return address

    def free(self, address: int) -> None:
        assert self._library.fake_free(address) == 0

    def peek(self, address: int, nbytes: int) -> Bytes:
        """Return the content of device memory."""
        content = np.empty(nbytes, np.uint8)
        assert self._library.fake_peek(address, content.ctypes.data, nbytes) == 0
        return content

    def poke(self, address: int, content: Bytes) -> None:
        content = np.ascontiguousarray(content)
        assert self._library.fake_poke(address, content.ctypes.data, content.nbytes) == 0

    def adopt(self, address: int, nbytes: int, device: int = 0) -> None:
        """Count memory of this process as the device's from now on."""
        self._library.fake_adopt(address, nbytes, device)

    def disown(self, address: int) -> None:
        self._library.fake_disown(address)

    def cut(self, address: int) -> None:
        """Split device memory into two allocations, the second of which begins here.

        No copy and no registration may span both.
        """
        self._library.fake_cut(address)

    # -- compute ----------------------------------------------------------------------------------

    def compute_stream(self, device: int = 0) -> int:
        """Return a stream for an engine's compute."""
        stream: int = self._library.fake_compute_stream(device)
        return stream

    def fill(self, address: int, nbytes: int, value: int, stream: int = 0) -> None:
        """Queue compute work that sets all bytes to ``value`` at some time."""
        self._library.fake_fill(address, nbytes, value, stream)

    def wait_for(self, stream: int) -> None:
        self._library.fake_wait_for(stream)

    # -- what was seen ----------------------------------------------------------------------------

    def count(self, name: str) -> int:
        """Return calls of ``name``; also "copies", "synchronous_copies", "peak_queued_bytes"."""
        return int(self._library.fake_count(name.encode()))

    @property
    def num_pending(self) -> int:
        """Operations that have yet to touch memory; a stream may still wait for what has ended."""
        return int(self._library.fake_num_pending())

    @property
    def violations(self) -> list[str]:
        """Return the misuses that a real machine might punish."""
        return self._lines("fake_violations")

    @property
    def leaks(self) -> list[str]:
        """Return what was not released."""
        return self._lines("fake_leaks")

    def _lines(self, name: str) -> list[str]:
        text = ctypes.create_string_buffer(1 << 20)
        getattr(self._library, name)(text, len(text))
        return text.value.decode().splitlines()
