"""Probe of the path between a disk and an accelerator, run in a child process.

Without a driver, a library may hang, end the process, or leave threads behind. So the child process
has a time limit, after which it is killed.

    python -m kvtier.tiers.disk.io.probe /nvme0 --device cuda
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import threading
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from kvtier.core.errors import DeviceError
from kvtier.core.system.child_process import Overdue, run_module
from kvtier.devices.base import Finding
from kvtier.tiers.disk.io.file_library import FileLibrary, Vendor
from kvtier.tiers.disk.io.trial import TrialResult
from kvtier.tiers.disk.io.vendors import VENDORS

LIMIT_S: Final = 30.0
"""Time limit of a whole probe. Opening cuFile's driver and its first transfer take seconds."""
TRIAL: Final = "kvtier.tiers.disk.io.trial"
MAX_LINES: Final = 12
"""Lines of a library's log that a step keeps."""
OF_DEVICE: Final = {"cuda": ("cufile", "hipfile"), "npu": ("nds",)}
"""File libraries by torch's name of the accelerator."""


class Reach(Enum):
    """Path of bytes between disk and accelerator."""

    DIRECT = "GPU-direct"
    BOUNCED = "compatibility mode"
    NONE = "no"


@dataclass(frozen=True, slots=True)
class Step:
    """One trial of a probe.

    reach: path that was asked for. For ``BOUNCED``, the library may choose.
    tried: result of the trial.
    log: errors that the library wrote to its log.
    """

    reach: Reach
    tried: TrialResult
    log: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """Result of a probe.

    kind: library that was tried, as ``VENDORS`` names it.
    library: its name and version; "" if it is missing.
    reach: path of bytes that works.
    tried: result of the trial.
    why_not: why no better path works; "" for the best one.
    steps: the trials.
    """

    kind: str
    library: str
    reach: Reach
    tried: TrialResult
    why_not: str
    steps: tuple[Step, ...] = ()

    @property
    def works(self) -> bool:
        """Whether bytes came back unchanged, by either path."""
        return self.reach is not Reach.NONE

    @property
    def is_bounced(self) -> bool:
        """Whether the library moved the bytes through host memory."""
        return self.reach is Reach.BOUNCED

    def finding(self) -> Finding:
        """Return the finding for ``kvtier doctor``."""
        topic = f"disk to accelerator: {self.kind}"
        if self.reach is Reach.NONE:
            return Finding(topic, "no", self.why_not)
        found = f"{self.reach.value}: {self.tried.engine}"
        speed = (
            f"{self.tried.accelerator}; wrote {self.tried.write_gb_per_s:.1f}, "
            f"read {self.tried.read_gb_per_s:.1f} GB/s in its first call"
        )
        if self.reach is Reach.DIRECT:
            return Finding(topic, found, speed)
        bounce = "every byte goes through host memory, inside the library; not direct because"
        return Finding(topic, found, f"{bounce} {self.why_not}; {speed}")


_lock = threading.Lock()
_known: dict[tuple[str, str, int, str], Probe] = {}
"""Results by library with version, kind, disk and accelerator."""


def probe(kind: str, folder: str, device: str = "cuda:0", limit_s: float = LIMIT_S) -> Probe:
    """Try a file library between ``folder`` and ``device``.

    Each combination of disk, library version and accelerator is tried once per process. It takes
    one or two child processes, and at most ``limit_s`` plus the time to kill a child. A failure is
    a result, not an error.

    Args:
        kind: "cufile", "hipfile" or "nds".
        folder: directory on the disk.
        device: accelerator, as torch names it.
        limit_s: time limit in seconds.
    """
    vendor = VENDORS[kind]
    try:
        library = FileLibrary(vendor)
        disk = os.stat(folder).st_dev
    except (DeviceError, OSError) as error:
        return Probe(kind, "", Reach.NONE, TrialResult(), str(error))
    key = (f"{library.path} {library}", kind, disk, device)
    with _lock:
        if key not in _known:
            _known[key] = _tried(kind, vendor, str(library), folder, device, limit_s)
        return _known[key]


def findings(folder: str, device: str, limit_s: float = LIMIT_S) -> list[Finding]:
    """Return findings for ``kvtier doctor``, one per library for ``device``.

    Args:
        folder: directory on the disk.
        device: "cuda" or "npu", with or without a number.
        limit_s: time limit of each probe in seconds.
    """
    return [each.finding() for each in _probes(folder, device, limit_s)]


def _probes(folder: str, device: str, limit_s: float) -> list[Probe]:
    kind, _, number = device.partition(":")
    named = f"{kind}:{number or 0}"
    return [probe(each, folder, named, limit_s) for each in OF_DEVICE.get(kind, ())]


def _tried(
    kind: str, vendor: Vendor, library: str, folder: str, device: str, limit_s: float
) -> Probe:
    """Try a library, first with its path through host memory forbidden, then allowed."""
    ends_at = time.monotonic() + limit_s
    try:
        fd, path = tempfile.mkstemp(prefix=".kvtier-probe-", dir=folder)
        os.close(fd)
    except OSError as error:
        return Probe(kind, library, Reach.NONE, TrialResult(), str(error))
    try:
        first = _step(Reach.DIRECT, vendor, [kind, device, path], ends_at, limit_s)
        strictly = first.tried
        if not strictly.why_not:
            return Probe(kind, library, Reach.DIRECT, strictly, "", (first,))
        if vendor.compat is None or time.monotonic() >= ends_at:
            return Probe(kind, library, Reach.NONE, strictly, strictly.why_not, (first,))
        second = _step(Reach.BOUNCED, vendor, [kind, device, path], ends_at, limit_s)
        steps, freely = (first, second), second.tried
        if not freely.why_not:
            return Probe(kind, library, Reach.BOUNCED, freely, strictly.why_not, steps)
        why_not = freely.why_not
        if strictly.why_not != why_not:
            why_not = f"not directly: {strictly.why_not}; nor in compatibility mode: {why_not}"
        return Probe(kind, library, Reach.NONE, freely, why_not, steps)
    finally:
        os.unlink(path)


def _step(
    reach: Reach, vendor: Vendor, arguments: list[str], ends_at: float, limit_s: float
) -> Step:
    """Run a trial, and keep the errors in the library's log."""
    with tempfile.TemporaryDirectory(prefix="kvtier-probe-") as folder:
        log = Path(folder, "log")
        variables = vendor.variables(reach is Reach.BOUNCED, str(log))
        tried = _run(arguments, variables, ends_at, limit_s)
        lines = log.read_text(errors="replace") if log.exists() else ""
    found = (line.strip() for line in re.findall(r"\bERROR +\S+ (.*)", lines))
    return Step(reach, tried, tuple(dict.fromkeys(found))[:MAX_LINES])


def _run(
    arguments: list[str], variables: dict[str, str], ends_at: float, limit_s: float
) -> TrialResult:
    """Run a trial in a child process until ``ends_at`` at the latest."""
    left_s = max(0.0, ends_at - time.monotonic())
    try:
        ended = run_module(TRIAL, *arguments, timeout_s=left_s, variables=variables)
    except Overdue as overdue:
        return TrialResult(why_not=f"it did not answer within {limit_s:g} s, and was {overdue}")
    for line in reversed(ended.output.splitlines()):
        if line.startswith("{") and ended.code >= 0:
            return TrialResult(**json.loads(line))
    return TrialResult(why_not=str(ended))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Find the path of bytes between a disk and an accelerator."
    )
    parser.add_argument("folder", help="directory on the disk, e.g. that of the slab")
    parser.add_argument("--device", default="cuda", help='"cuda" or "npu", or one with a number')
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    arguments = parser.parse_args()
    for each in _probes(arguments.folder, arguments.device, arguments.limit_s):
        line = each.finding()
        print(f"{line.topic}: {line.found}\n    {line.note}")
        for step in each.steps:
            print(f"    tried {step.reach.value}: {step.tried.why_not or 'it worked'}")
            for error in step.log:
                print(f"        {each.library} says: {error}")


if __name__ == "__main__":
    main()
