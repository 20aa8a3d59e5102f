"""A target whose cases go wrong in every way that the runner has to notice."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from random import Random

OUTCOMES = frozenset({"fine"})
CPU_S = 1.0
WALL_S = 4.0


def attempt(rng: Random, folder: Path) -> str:
    assert not list(folder.iterdir())
    (folder / "left").touch()
    match os.environ["KVTIER_FUZZ_CONTROL"]:
        case "busy":
            while True:
                pass
        case "stuck":
            time.sleep(1000)
        case "large":
            bytearray(1 << 30)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "wrong":
            raise ValueError("a wrong answer")
    return "fine"
