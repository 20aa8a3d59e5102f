"""Tests that every vLLM passes, whichever front serves it: ``make test-vllm-version VLLM=0.30.0``.

A real engine with what ``kvtier vllm-args`` prints for it. KVTIER_PROMPTS: how many, of 3,500
tokens; fewer and shorter ones without. KVTIER_CONNECTOR: which front, if not the first that fits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.engines import (
    BLOCK,
    Answer,
    Answers,
    are_close,
    count,
    damage,
    engine,
    one_by_one,
    prompt,
)

CONNECTOR = os.environ.get("KVTIER_CONNECTOR", "auto")
NUM = int(os.environ.get("KVTIER_PROMPTS", "0"))
NUM_BLOCKS = 27 if NUM else 6
# 44 tokens beyond the last full block: a hit on the device and one elsewhere end at the same block.
PROMPTS = [prompt(seed, NUM_BLOCKS * BLOCK + 44) for seed in range(NUM or 4)]
DISK = ("--disk-capacity", "1GiB")
pytestmark = pytest.mark.timeout(3600 if NUM else 900)


def printed(*options: str) -> dict[str, Any]:
    """Return the connector's configuration that ``kvtier vllm-args`` prints here."""
    command = [
        sys.executable,
        "-m",
        "kvtier.tools.cli",
        "vllm-args",
        "--json",
        "--connector",
        CONNECTOR,
    ]
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    config: dict[str, Any] = json.loads(done.stdout)
    config["kv_connector_extra_config"]["load_policy"] = "always"
    return config


@pytest.fixture(scope="module")
def slab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slab")


@pytest.fixture(scope="module")
def config(slab: Path, record_testsuite_property: Callable[[str, object], None]) -> dict[str, Any]:
    found = printed("--host-capacity", "1GiB", "--disk-path", str(slab), *DISK)
    record_testsuite_property("connector", found["kv_connector"])  # for the tables of versions
    return found


@pytest.fixture(scope="module")
def served(config: dict[str, Any]) -> Answers:
    """Return the answers of an engine with kvtier that is killed when they are on disk."""
    command = [sys.executable, "-m", "tests.engines.vllm.test_versions", json.dumps(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        lines = [line for line in process.stdout if line.startswith('{"cold"')]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert lines, "the engine ended without its answers"
    found = json.loads(lines[0])
    return {name: [_from_json(each) for each in found[name]] for name in found}


def _from_json(pair: Any) -> tuple[int, Answer]:
    cached, (tokens, steps) = pair
    return cached, [tokens, [{int(token): value for token, value in s.items()} for s in steps]]


def _serve(config: dict[str, Any]) -> None:
    """Answer all prompts twice, print the answers, and go on until killed."""
    with engine(config) as llm:
        cold = one_by_one(llm, PROMPTS)
        assert llm.reset_prefix_cache()
        warm = one_by_one(llm, PROMPTS)
        wanted = len(PROMPTS) * NUM_BLOCKS
        for _ in range(300):
            one_by_one(llm, [prompt(1, 3)])  # statistics come with a step
            if count("vllm:kvtier_used_chunks", tier="disk") >= wanted:
                break
            time.sleep(0.1)
        sys.stdout.write(json.dumps({"cold": cold, "warm": warm}) + "\n")
        sys.stdout.flush()
        os.killpg(0, signal.SIGKILL)


def test_hit_in_host_memory_has_the_bits_of_vllms_own(alone: Answers, served: Answers) -> None:
    assert served["cold"] == alone["cold"]
    assert served["warm"] == alone["warm"]
    assert {cached for cached, _ in served["warm"]} == {NUM_BLOCKS * BLOCK}


def test_hit_on_disk_after_a_kill_has_them_too(
    alone: Answers, served: Answers, config: dict[str, Any]
) -> None:
    assert served
    with engine(config) as llm:
        assert one_by_one(llm, PROMPTS) == alone["warm"]


def test_damaged_block_is_noticed_and_computed(
    alone: Answers, served: Answers, config: dict[str, Any], slab: Path
) -> None:
    assert served
    damage(slab / "rank0" / "data.slab")
    with engine(config) as llm:
        assert one_by_one(llm, PROMPTS) == alone["cold"]
        if not NUM:
            assert one_by_one(llm, PROMPTS) == alone["warm"]
            return
        # Damage of a long prompt's last blocks is found after they were computed. They are stored
        # when they are computed once more, behind a hit, which differs by rounding.
        one_by_one(llm, PROMPTS)
        for found, right in zip(one_by_one(llm, PROMPTS), alone["warm"], strict=True):
            assert found[0] == right[0]
            assert are_close(found[1], right[1])


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
