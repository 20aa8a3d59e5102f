"""One process with an engine over a store: computes a prompt, and writes its logits and hits.

python -m tests.tiers.remote.replica MODEL LOCATION RESULT
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.core.types import LoadPolicy
from kvtier.serve.engine import Engine, EngineConfig
from tests.serve.engine.asking import GREEDY
from tests.serve.engine.conftest import SMALL

PROMPT = [7 + number * number % 501 for number in range(300)]


def config(model: str, *locations: str, **settings: Any) -> EngineConfig:
    cache = replace(
        SMALL.cache,
        storage=locations,
        load_policy=LoadPolicy.ALWAYS,
        lookup_deadline_s=10.0,
        **settings,
    )
    return replace(SMALL, model=model, cache=cache)


def check_two_replicas(model: str, location: str, folder: Path) -> None:
    """Check that one process loads the blocks of another one, with equal logits."""
    for name in ("first", "second"):
        command = [sys.executable, "-m", "tests.tiers.remote.replica", model, location]
        subprocess.run([*command, str(folder / name)], check=True, timeout=120)
    hits = [json.loads((folder / f"{name}.json").read_text()) for name in ("first", "second")]
    assert hits == [{}, {location.partition(":")[0]: 288}]
    cold, warm = (np.load(folder / f"{name}.npy") for name in ("first", "second"))
    assert np.array_equal(cold, warm)


def main(model: str, location: str, result: str) -> None:
    with Engine(config(model, location)) as engine:
        completion = engine.submit(PROMPT, GREEDY).result(60)
        assert engine.drain()
    assert completion.logits is not None
    np.save(f"{result}.npy", completion.logits)
    Path(f"{result}.json").write_text(json.dumps(completion.hit_tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
