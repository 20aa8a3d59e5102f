"""The Makefile's choice of a Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["old", "missing"])
def test_python_that_is_named_and_does_not_fit_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "old").write_text("#!/bin/sh\nexit 1\n")  # its version is too low
    (tmp_path / "old").chmod(0o755)
    python, venv = tmp_path / name, tmp_path / "venv"
    done = subprocess.run(
        ["make", f"VENV={venv}", f"PYTHON={python}", f"{venv}/bin/python"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert f"PYTHON={python} is not Python 3.11 or newer" in done.stderr
    assert not venv.exists()
