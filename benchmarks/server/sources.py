"""CPU time of a prompt in kvtier's server: computed, and from each tier.

The model has random weights and computes on one thread. Each round has a new prompt, whose logits
from every tier must have the bits of the computed ones.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.engines.model import TOKENIZER
from kvtier.config import CHUNK_TOKENS, CacheConfig
from kvtier.engine import Completion, Engine, EngineConfig, SamplingParams
from kvtier.tools.report.stats import median_with_interval
from kvtier.types import DEVICE

T = TypeVar("T")
PROMPT_TOKENS = 4096 + 64
ROUNDS, QUICK_ROUNDS = 8, 2
COLD, WARM = "cold", (DEVICE, "host", "disk")
PARAMS = SamplingParams(max_tokens=1, ignore_eos=True, keep_logits=True)


def ask(engine: Engine, prompt: Sequence[int], tier: str = "") -> tuple[float, Completion]:
    """Return the CPU seconds of one token, and the answer. AssertionError if not from ``tier``."""
    assert engine.drain()
    began = time.process_time()
    found = engine.submit(prompt, PARAMS).result(600)
    seconds = time.process_time() - began
    assert not tier or found.hit_tokens == {tier: len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS}
    return seconds, found


def measure(
    config: Any, num_rounds: int, look: Callable[[Engine, Sequence[int]], T]
) -> tuple[dict[str, float], T]:
    """Return the median CPU milliseconds by source, and what ``look`` returns.

    config: transformers' configuration of the model. look: called after the first prompt, with it.
    Raises AssertionError if logits differ.
    """
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(Path(folder, "model"))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / file, Path(folder, "model"))
        found, seen = _measure(Path(folder), num_rounds, look)
    return {source: 1e3 * median_with_interval(each).value for source, each in found.items()}, seen


def _measure(
    folder: Path, num_rounds: int, look: Callable[[Engine, Sequence[int]], T]
) -> tuple[dict[str, list[float]], T]:
    settings = EngineConfig(
        model=str(folder / "model"),
        device_capacity="256MiB",
        max_model_tokens=PROMPT_TOKENS + 64,
        threads=1,
        cache=CacheConfig(
            host_capacity="1GiB", disk_path=str(folder / "disk"), disk_capacity="1GiB"
        ),
    )
    made = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 8000, (num_rounds, PROMPT_TOKENS), generator=made).tolist()
    found: dict[str, list[float]] = {source: [] for source in (COLD, *WARM)}
    expected, seen = [], []
    with Engine(settings) as engine:
        for prompt in prompts:
            seconds, answer = ask(engine, prompt)
            found[COLD].append(seconds)
            expected.append(answer.logits)
            if not seen:
                assert engine.drain()
                seen.append(look(engine, prompt))
            for tier in (DEVICE, "host"):
                seconds, answer = ask(engine, prompt, tier)
                found[tier].append(seconds)
                assert np.array_equal(answer.logits, expected[-1]), f"{tier}: other logits"
                assert engine.drain()
                engine.clear_tier(DEVICE)
    with Engine(settings) as engine:
        for prompt, right in zip(prompts, expected, strict=True):
            seconds, answer = ask(engine, prompt, "disk")
            found["disk"].append(seconds)
            assert np.array_equal(answer.logits, right), "disk: other logits"
    return found, seen[0]


def table_of(medians: Mapping[str, float]) -> Table:
    """Return a table of milliseconds by source."""
    table = Table(*medians, title=f"CPU ms of a prompt of {PROMPT_TOKENS} tokens, medians")
    table.add_row(*(f"{ms:,.0f}" for ms in medians.values()))
    return table
