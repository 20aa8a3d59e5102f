"""Facts about the machine, for the results of a benchmark."""

from __future__ import annotations

from pathlib import Path

from kvtier.tools.report import machine


def machine_facts() -> dict[str, object]:
    """Return the facts of ``kvtier bench``, and when the kernel grants huge pages.

    The load average is the current one: call this before the benchmark adds to it.
    """
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    granted = setting.read_text().partition("[")[2].partition("]")[0] if setting.exists() else ""
    return {**machine.machine_facts(), "huge_pages": granted or "unknown"}
