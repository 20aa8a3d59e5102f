"""Facts about the machine that a benchmark ran on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvtier import __version__
from kvtier.core.hot import NATIVE, NATIVE_REASON
from kvtier.core.system.process import num_cores

Fact = str | int | float | list[float]


def machine_facts(root: Path = Path("/")) -> dict[str, Fact]:
    """Return processor, memory, versions and current load. root: folder of ``proc``."""
    facts: dict[str, Fact] = {
        "cpu": _cpu_model(root),
        "cores": num_cores(),
        "memory_gib": _memory_gib(root),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kvtier": __version__,
    }
    for package in ("torch", "transformers", "numpy"):
        facts[package] = _version(package)
    facts["native_core"] = "on" if NATIVE else f"off: {NATIVE_REASON}"
    facts["load_average"] = load_average()
    return facts


def load_average() -> list[float]:
    """Return the load averages over 1, 5 and 15 minutes; empty if the system has none."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except (AttributeError, OSError):
        return []


def _cpu_model(root: Path) -> str:
    found = _field(root / "proc/cpuinfo", "model name")
    return found or platform.processor() or platform.machine()


def _memory_gib(root: Path) -> float:
    found = _field(root / "proc/meminfo", "MemTotal")
    return round(int(found.split()[0]) / 2**20, 1) if found else 0.0


def _field(path: Path, name: str) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
