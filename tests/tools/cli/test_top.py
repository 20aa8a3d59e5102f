"""``kvtier top`` in a terminal, and without one."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from tests.kit.cli import refused
from tests.kit.servers import free_port


def test_q_quits() -> None:
    own, terminal = pty.openpty()
    command = [sys.executable, "-m", "kvtier.tools.cli", "top", f"127.0.0.1:{free_port()}"]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as running:
        os.close(terminal)
        shown = b""
        while b"Retrying" not in shown:
            shown += os.read(own, 4096)
        os.write(own, b"q")
        # What it still writes is read, so that it does not wait for room in the terminal.
        while True:
            try:
                if not os.read(own, 4096):
                    break
            except OSError:  # the other end is closed
                break
        assert running.wait() == 0
    os.close(own)


def test_a_wrong_address_ends_with_a_sentence_where_nobody_watches(tmp_path: Path) -> None:
    assert "Connection refused" in refused("top", f"127.0.0.1:{free_port()}")
    assert refused("top", "--node", str(tmp_path / "none")).startswith("kvtier top: ")
    assert "--node: http://127.0.0.1:1 is a network address" in refused(
        "top", "--node", "http://127.0.0.1:1"
    )
