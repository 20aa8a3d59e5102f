"""Machine facts, from a made-up ``/proc``."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from kvtier.tools.report.machine import machine_facts

pytestmark = pytest.mark.engine


def test_facts_are_read_where_the_system_has_them(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Quick CPU @ 2 GHz\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal:       8388608 kB\nMemFree: 1 kB\n")
    facts = machine_facts(tmp_path)
    assert facts["cpu"] == "Quick CPU @ 2 GHz"
    assert facts["memory_gib"] == 8.0
    assert facts["python"] == platform.python_version()
    assert str(facts["native_core"]).startswith(("on", "off: "))
    json.dumps(facts)


def test_a_system_without_proc_still_has_facts(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path)
    assert facts["cpu"]
    assert facts["memory_gib"] == 0.0
    assert isinstance(facts["cores"], int)
    assert facts["cores"] >= 1
