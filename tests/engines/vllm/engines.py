"""Real vLLM engines on the CPU, with kvtier under them or without."""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import transformers
import vllm
from prometheus_client import REGISTRY
from vllm.config import KVTransferConfig

import kvtier
from tests.kit.waiting import wait_until


def _readable(model: Path) -> Path:
    """Return the model, or a copy whose tokenizer Transformers 4 can read (vLLM 0.18)."""
    if int(transformers.__version__.split(".")[0]) > 4:
        return model
    copy = Path(tempfile.mkdtemp(prefix="kvtier-model-")) / model.name
    shutil.copytree(model, copy)
    atexit.register(shutil.rmtree, copy.parent, ignore_errors=True)
    file = copy / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    file.write_text(json.dumps(config))
    return copy


MODEL = _readable(Path(kvtier.__file__).parent / "serve/engine/builtin/kvtier-tiny")
BLOCK = 128
"""vLLM's block size on the CPU, in tokens."""
NUM_BLOCKS = 64
"""Blocks of the device pool."""
ENVIRONMENT = {
    # With a connector vLLM takes other cores than without, and its sums come out in another order.
    "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "max_model_len": 4096,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "disable_log_stats": False,
}

DIFFERENT = 1e-3
"""Log-probabilities that are further apart are those of another input."""

Connects = Callable[..., dict[str, Any]]
"""Returns the value of ``--kv-transfer-config`` for some settings."""
Prompt = dict[str, list[int]]
Answer = list[Any]
"""Tokens, and per step the log-probabilities of the likeliest ones."""
Answers = dict[str, list[tuple[int, Answer]]]
"""Cached tokens and answers, by the state of the cache: "cold" or "warm"."""


def connector(**settings: object) -> dict[str, Any]:
    """Return the value of ``--kv-transfer-config`` for vLLM's OffloadingConnector."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "kvtier", "load_policy": "always", **settings},
    }


def own_connector(**settings: object) -> dict[str, Any]:
    """The same, for kvtier's own front, which stands on no other connector."""
    return {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm.entry",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"load_policy": "always", **settings},
    }


def multi(*inside: dict[str, Any]) -> dict[str, Any]:
    """The same, with several connectors inside vLLM's MultiConnector."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(inside)},
    }


def with_disk(slab: Path, **settings: object) -> dict[str, Any]:
    """Host memory for 341 blocks of the built-in model, and a disk for as many."""
    sizes = {"host_capacity": "256MiB", "disk_path": str(slab), "disk_capacity": "256MiB"}
    return connector(**{**sizes, **settings})


@contextmanager
def engine(config: dict[str, Any] | None, model: Path = MODEL, **changes: Any) -> Iterator[Any]:
    """Run a vLLM. config: its connector's; None for vLLM alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            if name not in os.environ:
                patch.setenv(name, value)
        connects = None if config is None else KVTransferConfig(**config)
        made = vllm.LLM(str(model), **{**OPTIONS, "kv_transfer_config": connects, **changes})
        try:
            yield made
        finally:
            made.llm_engine.engine_core.shutdown()


def prompt(seed: int, num_tokens: int) -> Prompt:
    """Return a prompt whose tokens are unique to the seed."""
    rng = random.Random(seed)
    return {"prompt_token_ids": [rng.randrange(10, 4000) for _ in range(num_tokens)]}


def run(llm: Any, *prompts: Prompt, **options: Any) -> list[tuple[int, Answer]]:
    """Return, per prompt, the number of cached tokens, and the generated tokens with logprobs."""
    params = vllm.SamplingParams(max_tokens=6, temperature=0, logprobs=4, ignore_eos=True)
    found = []
    for output in llm.generate(list(prompts), params, use_tqdm=False, **options):
        (answer,) = output.outputs
        steps = [
            {token: each.logprob for token, each in sorted(step.items())}
            for step in answer.logprobs
        ]
        found.append((output.num_cached_tokens, [answer.token_ids, steps]))
    return found


def are_close(one: Answer, other: Answer, within: float = DIFFERENT) -> bool:
    """Whether two answers are equal up to rounding: their log-probabilities within so much."""
    (tokens, steps), (other_tokens, other_steps) = one, other
    if list(tokens) != list(other_tokens):
        return False
    return all(
        abs(step[token] - other_step.get(token, step[token])) < within
        for step, other_step in zip(steps, other_steps, strict=True)
        for token in step
    )


def one_by_one(llm: Any, prompts: list[Prompt]) -> list[tuple[int, Answer]]:
    """Call ``run`` for each prompt alone, with no other one in the batch."""
    return [run(llm, each)[0] for each in prompts]


def reset(llm: Any, **options: bool) -> None:
    """Empty vLLM's own pool, as soon as no store reads its pages."""
    wait_until(lambda: llm.reset_prefix_cache(**options), "no page is held")


def moved_from_disk(before: tuple[float, float] = (0, 0)) -> tuple[float, float]:
    """Return the bytes read since ``before``: directly to the device, and to host memory."""
    name = "vllm:kvtier_moved_bytes_total"
    past_host, through = (count(name, src="disk", dst=dst) for dst in ("device", "host"))
    return past_host - before[0], through - before[1]


def loaded(tier: str) -> float:
    """Return the blocks that were loaded from a tier."""
    return count("vllm:kvtier_loaded_chunks_total", tier=tier)


def bind_ranks(patch: pytest.MonkeyPatch, num: int) -> None:
    """Give each of so many ranks a core. vLLM wants a NUMA node for each otherwise."""
    cores = sorted(os.sched_getaffinity(0))[:num]
    if len(cores) < num:
        pytest.skip(f"{num} ranks need as many cores")
    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores)))


def damage(data: Path) -> None:
    """Change three bytes of every 128 KiB of a slab: some in each block."""
    with data.open("r+b") as file:
        for at in range(0, data.stat().st_size, 128 << 10):
            file.seek(at + 100)
            file.write(b"\xa5\x5a\xa5")


def count(name: str, **labels: str) -> float:
    """Return Prometheus's value of a metric in this process, over all its engines."""
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
