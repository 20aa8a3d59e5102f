"""Hints that act, under a real vLLM on the CPU with either connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm

from tests.engines.vllm.engines import (
    BLOCK,
    Connects,
    are_close,
    connector,
    count,
    engine,
    own_connector,
    prompt,
    run,
)

PROMPT = prompt(1, 6 * BLOCK + 50)
GIVEN = {"demote": {}, "prefetch": {"within_s": 0.1}}
ACTION = {"action_id": "1", "action_version": "1.0"}


def hinted(action: str, outcome: str) -> float:
    return count("vllm:kvtier_hints_total", action=action, outcome=outcome)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("connects", [connector, own_connector])
def test_a_request_has_its_blocks_demoted_and_read_again(
    connects: Connects, tmp_path: Path
) -> None:
    sizes = {"host_capacity": "64MiB", "disk_path": str(tmp_path), "disk_capacity": "64MiB"}
    with engine(connects(**sizes)) as llm:
        before = {name: hinted(*name) for name in EXPECTED}
        written = count("vllm:kvtier_moved_bytes_total", src="host", dst="disk")
        (answer,) = run(llm, PROMPT)
        steps(llm, lambda: count("vllm:kvtier_moved_bytes_total", src="host", dst="disk") > written)
        read = count("vllm:kvtier_moved_bytes_total", src="disk", dst="host")
        params: Any = vllm.SamplingParams(
            max_tokens=1, extra_args={"kv_transfer_params": {"kvtier": GIVEN}}
        )
        llm.generate([PROMPT], params, use_tqdm=False)
        steps(llm, lambda: count("vllm:kvtier_moved_bytes_total", src="disk", dst="host") > read)
        assert llm.reset_prefix_cache()
        (again,) = run(llm, PROMPT)
        assert are_close(again[1], answer[1])
        assert again[0] == 6 * BLOCK
        steps(llm, lambda: {name: hinted(*name) - before[name] for name in EXPECTED} == EXPECTED)


EXPECTED = {("demote", "done"): 1, ("prefetch", "begun"): 1, ("prefetch", "used"): 1}


def steps(llm: Any, is_so: Any) -> None:
    """Let the engine take steps for other prompts until a condition holds."""
    for seed in range(100, 300):
        if is_so():
            return
        run(llm, prompt(seed, 20))
    pytest.fail("it never came to be")
