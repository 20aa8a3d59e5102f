"""A serving process may fork. Neither the child's work nor its exit affects the parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
]


@pytest.mark.slow
@pytest.mark.nightly
def test_engine_serves_from_disk_after_children_have_exited(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.serve.engine.forking", str(tmp_path / "slab")],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert not done.stderr, "what a child can't give back is nothing to complain about"
