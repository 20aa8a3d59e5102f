"""Diagnosis of the machine, for ``kvtier doctor``. Works without torch.

It loads no model unless one is named.
"""

from __future__ import annotations

import mmap
import os
import platform
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtier import __version__
from kvtier.core.errors import CacheError, ConfigError, install_command
from kvtier.core.system.control_groups import cpu_quota
from kvtier.core.system.memory import available_bytes
from kvtier.core.system.process import num_cores
from kvtier.core.system.user_paths import check_socket
from kvtier.devices.base import Device, Finding, Memory

if TYPE_CHECKING:
    from kvtier.connectors.common.contract import Contract

PACKAGES = ("numpy", "torch", "transformers", "tokenizers", "safetensors", "fastapi", "uvicorn")
ACCELERATORS = ("cuda", "npu", "xpu", "mps")
"""torch device types of NVIDIA and AMD, Ascend, Intel and Apple. The first one found is used."""

BACK_END_NAMES = {
    "cuda": "NVIDIA's driver",
    "hip": "AMD's driver",
    "ascend": "Ascend's driver",
    "torch": "torch's own copies",
}

NODE_ANSWER_S = 5.0
"""Longest wait for an answer of a node."""
SHARED_MEMORY = "/dev/shm"
TRIAL_BYTES = 1 << 16
"""Bytes of memory on which page-locking is tried."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of ``kvtier doctor``.

    device: the device that ``--device auto`` selects. native: whether the native core is in use.
    """

    version: str
    device: str
    native: bool
    sections: Mapping[str, tuple[Finding, ...]]


def diagnose(
    root: Path = Path("/"),
    disk_path: str | None = None,
    node: str | None = None,
    model: str | None = None,
) -> Diagnosis:
    """Return everything that ``kvtier doctor`` reports.

    Args:
        root: folder in which ``proc`` and ``sys`` are mounted.
        disk_path: folder for which direct reads by the accelerator are tried.
        node: socket of a node to which a connection is tried.
        model: name or directory of a model that is loaded and checked.
    """
    native = native_core()
    devices, device = devices_found()
    return Diagnosis(
        version=__version__,
        device=device,
        native=native.found == "yes",
        sections={
            "machine": (*machine(root), huge_pages(root)),
            "packages": (*packages(), *engines()),
            "core": (native,),
            "devices": devices,
            "disk": disk_to_accelerator(device, disk_path),
            **({} if node is None else {"node": node_here(Path(node))}),
            **({} if model is None else {"model": model_here(model, device)}),
        },
    )


def machine(root: Path) -> tuple[Finding, ...]:
    """Return the findings on system, processor and memory."""
    left_bytes, limited_by = available_bytes(root)
    quota = cpu_quota(root)
    cores = f"{num_cores(root)} of {os.cpu_count()} cores may be used"
    if quota is not None:
        cores += f"; the control group's quota is {quota:g}"
    return (
        Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Finding("python", platform.python_version()),
        Finding("CPU", _cpu_name(root), cores),
        Finding("memory left", f"{left_bytes / 2**30:.1f} GiB", f"limited by: {limited_by}"),
    )


def _cpu_name(root: Path) -> str:
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line)
    return next(names, platform.machine())


def huge_pages(root: Path) -> Finding:
    """Return whether the host tier's arena can have huge pages, which it requests itself."""
    topic = "huge pages"
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return Finding(topic, "no", "this system has no transparent huge pages")
    mode = text.partition("[")[2].partition("]")[0]
    if mode == "never":
        return Finding(topic, "no", "switched off: transparent_hugepage/enabled is never")
    return Finding(topic, "yes", f"transparent_hugepage/enabled is {mode}")


def packages() -> tuple[Finding, ...]:
    """Return the versions of the packages that the engine and the server need."""
    from kvtier.connectors.transformers.versions import untested

    found = []
    for name in PACKAGES:
        try:
            found.append(Finding(name, version(name), untested(name)))
        except PackageNotFoundError:
            note = f"kvtier serve needs it: {install_command('engine')}"
            found.append(Finding(name, "not installed", note))
    return tuple(found)


def engines() -> tuple[Finding, ...]:
    """Return the installed engines with a kvtier connector, and whether it supports them.

    None of them is imported.
    """
    from kvtier.connectors.sglang.shared.contract import LINKER, STORAGE

    found = (
        _vllm(),
        _engine(STORAGE, "kvtier sglang-args"),
        _engine(LINKER, "kvtier sglang-args --host-capacity", "sglang: linker"),
    )
    return tuple(each for each in found if each is not None)


def _vllm() -> Finding | None:
    """Return the finding on vLLM, with the connector that serves it; None if not installed."""
    from kvtier.connectors.vllm.shared.fronts import OFFLOADING, choose

    chosen = choose()
    if not chosen.version:
        return None
    if chosen.front is None:
        return Finding("vllm", chosen.version, f"kvtier can't serve it: {chosen.why}")
    note = f"served by {chosen.front.connector}"
    if chosen.why:
        note += f" ({OFFLOADING.connector} does not fit: {chosen.why})"
    if chosen.front.contract.was_run_with(chosen.version):
        note += ": kvtier vllm-args prints the option for it"
    else:
        note += ": what kvtier relies on is as it knows it, but it was never run with it"
    return Finding("vllm", chosen.version, note)


def _engine(contract: Contract, command: str, topic: str = "") -> Finding | None:
    """Return the finding on one engine; None if it is not installed.

    Args:
        contract: the connector's contract with the engine.
        command: the command that prints the engine's options.
        topic: name of the finding; by default, the engine's package.
    """
    from kvtier.connectors.common.contract import version_of

    folder = contract.installed()
    if folder is None:
        return None
    version, topic = version_of(folder), topic or contract.package
    if found := contract.differences(folder):
        return Finding(topic, version, f"kvtier can't serve it: {'; '.join(found)}")
    if not contract.was_run_with(version):
        note = "served: what kvtier relies on is as it knows it, but it was never run with it"
        return Finding(topic, version, note)
    return Finding(topic, version, f"served: {command} prints the option for it")


def native_core() -> Finding:
    """Return whether the native core is installed, and what its absence costs."""
    topic = "native core"
    try:
        from kvtier.core.hot import NATIVE, NATIVE_REASON
    except (ImportError, ValueError) as error:
        return Finding(topic, "broken", str(error))
    if NATIVE:
        return Finding(topic, "yes", "batched copies run in C++")
    note = f"slower Python code is used, and LRU in every tier: {NATIVE_REASON}"
    return Finding(topic, "no", note)


def devices_found() -> tuple[tuple[Finding, ...], str]:
    """Return per device its back end, or what is missing, and the device that "auto" selects."""
    from kvtier.devices.find import look_for

    findings: list[Finding] = []
    chosen = "cpu"
    for kind in ("cpu", *ACCELERATORS):
        try:
            device, misses = look_for(kind)
        except (CacheError, ImportError, RuntimeError, ValueError) as error:
            findings.append(Finding(kind, "no", str(error)))
            continue
        if device is None or kind == "cpu":
            findings.append(Finding(kind, "no" if device is None else "yes"))
        findings += [
            Finding(
                f"{kind}: {BACK_END_NAMES.get(miss.topic, miss.topic)}", "no", _short(miss.note)
            )
            for miss in misses
        ]
        if device is not None:
            findings += [*_of(device, kind), page_locking(device)]
            if chosen == "cpu":
                chosen = kind
    findings.append(Finding("auto", chosen, "what --device auto means here"))
    return tuple(findings), chosen


def disk_to_accelerator(device: str, disk_path: str | None) -> tuple[Finding, ...]:
    """Return how ``device``, such as "cuda:1", can read files of a folder directly.

    If a folder is given, each library for it is tried.
    """
    topic = "disk to accelerator"
    if device == "cpu":
        return (Finding(topic, "no", "no accelerator is here"),)
    from kvtier.tiers.disk.io.probe import OF_DEVICE, findings

    if device.partition(":")[0] not in OF_DEVICE:
        note = f"no file library is known for the memory of {device}"
        return (Finding(topic, "no", note),)
    if disk_path is None:
        note = "name a folder on the disk that is meant: kvtier doctor --disk-path /nvme/kv"
        return (Finding(topic, "not tried", note),)
    return tuple(findings(disk_path, device))


def node_here(path: Path) -> tuple[Finding, ...]:
    """Return what an engine that is started here would find of the node at a socket."""
    try:
        from kvtier.node.client.channel import NodeClient, NodeError
        from kvtier.node.client.control import ControlClient
    except ImportError as error:
        return (Finding("reachable", "no", f"{error}; install it: {install_command('node')}"),)
    try:
        check_socket(path, "--node")
    except ConfigError as error:
        return (Finding("reachable", "no", str(error)),)
    client = NodeClient(path)
    try:
        channel = client.take(time.monotonic() + NODE_ANSWER_S)
    except NodeError as error:
        return (
            Finding("reachable", "no", f"{error}; the node's log says why it refuses a process"),
            *_limits(0),
        )
    num_bytes = channel.mapped.memory.nbytes
    client.put_back(channel)
    client.close()
    try:
        version = str(ControlClient(path, NODE_ANSWER_S).get("/status")["version"])
        note = "" if version == __version__ else f"this is {__version__}"
    except CacheError as error:
        version, note = "unknown", str(error)
    return (
        Finding("reachable", "yes", str(path)),
        Finding("version", version, note),
        Finding("memory", f"{num_bytes >> 20} MiB", "it can be mapped here"),
        Finding("end of this process", "noticed", "the node watches it by a pidfd"),
        *_limits(num_bytes),
    )


def model_here(model: str, device: str) -> tuple[Finding, ...]:
    """Return what the embedded engine would make of a model on ``device``."""
    try:
        from kvtier.serve.engine.self_check import examine
    except ImportError as error:
        return (Finding("served", "no", f"{error}; install it: {install_command('engine')}"),)
    return examine(model, device)


def _limits(num_bytes: int) -> tuple[Finding, ...]:
    """Return the limits of this process that matter beside a node with so much memory."""
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_enough = memlock == resource.RLIM_INFINITY or memlock >= num_bytes
    note = "" if is_enough else "too low for an accelerator to register the memory: unlimited"
    shown = "unlimited" if memlock == resource.RLIM_INFINITY else f"{memlock / 2**20:.0f} MiB"
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        shared = Finding(SHARED_MEMORY, "no", error.strerror or "")
    else:
        size, free = (n * found.f_frsize / 2**20 for n in (found.f_blocks, found.f_bavail))
        shared = Finding(
            SHARED_MEMORY,
            f"{size:.0f} MiB",
            f"{free:.0f} MiB free; engines may need it for themselves, a node's engine does not",
        )
    return Finding("memlock", shown, note), shared


def _short(reason: str) -> str:
    """Return ``reason`` without the list of device types that torch appends."""
    before, found, after = reason.partition(": Expected one of")
    return before + after[after.find(". ") :] if found and ". " in after else before


def _of(device: Device, kind: str) -> list[Finding]:
    """Return the device's findings, with its name before each topic."""
    topics = (finding for finding in device.findings() if finding.topic != "device")
    named = [] if kind == "cpu" else [Finding(device.name, "yes")]
    return [
        *named,
        *(Finding(f"{device.name}: {topic.topic}", topic.found, topic.note) for topic in topics),
    ]


def page_locking(device: Device) -> Finding:
    """Return whether ``device`` can copy directly from host memory, by a small trial."""
    topic = f"{device.name}: page-locking"
    if device.name == "cpu":
        return Finding(topic, "not needed", "device memory is host memory")
    arena = mmap.mmap(-1, TRIAL_BYTES)
    address = np.frombuffer(arena, np.uint8).ctypes.data
    memory = Memory(address, TRIAL_BYTES, "host", arena)
    if not device.page_lock(memory):
        return Finding(topic, "no", "not granted: copies go through pageable memory")
    device.unlock(memory)
    return Finding(topic, "yes", "the device copies directly from the host tier")
