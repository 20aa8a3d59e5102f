"""The kernel for small copies, by Triton's interpreter; a GPU runs it in ``kvtier bench copy``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; it comes with a CUDA build of torch")


def test_kernel_moves_every_byte_and_no_other() -> None:
    # A process of its own, because Triton decides when it is imported whether it interprets.
    script = Path(__file__).with_name("run_kernel.py")
    ran = subprocess.run(
        [sys.executable, script], check=False, capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == 40
