"""An engine over a disk whose process forks: ``-m tests.serve.engine.forking FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier.core.errors import Closed
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.serve.engine import Engine, SamplingParams
from tests.serve.engine.test_disk import with_disk

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True, keep_logits=True)
PROMPT = list(range(5, 305))
PATIENCE_S = 60


def main(folder: Path) -> None:
    engine = Engine(with_disk(folder))
    engine.start()
    cold = engine.submit(PROMPT, GREEDY).result(PATIENCE_S)
    assert engine.drain()
    for uses_it in (False, True):
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE_S)
            if uses_it:
                with pytest.raises(Closed, match="the engine belongs to process"):
                    engine.submit(PROMPT, GREEDY)
                with pytest.raises(Closed, match="the engine belongs to process"):
                    engine.clear_tier(DEVICE)
            sys.exit(0)  # which closes the engine, as a normal exit does
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {status:#x}"
        engine.clear_tier(DEVICE)
        engine.clear_tier(HOST)
        warm = engine.submit(PROMPT, GREEDY).result(PATIENCE_S)
        assert warm.hit_tokens == {DISK: 288}, warm.hit_tokens
        assert np.array_equal(cold.logits, warm.logits)
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
