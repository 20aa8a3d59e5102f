"""A real vLLM on the CPU loads what another has computed from a pack file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.vllm.engines import (
    BLOCK,
    Answers,
    Connects,
    count,
    engine,
    loaded,
    one_by_one,
    prompt,
)
from tests.kit.cli import kvtier

PROMPTS = [prompt(seed, 6 * BLOCK + 50) for seed in range(3)]
NEW = prompt(7, 6 * BLOCK + 50)
NUM_BLOCKS = 6 * len(PROMPTS)


@pytest.mark.timeout(900)
def test_engine_loads_a_pack_file_and_writes_nothing_to_it(
    alone: Answers, connects: Connects, tmp_path: Path
) -> None:
    store, file = f"dir://{tmp_path}/kv?publish_s=0.1", tmp_path / "prompts.kvpack"
    with engine(connects(host_capacity="256MiB", storage=store)) as first:
        assert one_by_one(first, PROMPTS) == alone["cold"]
        one_by_one(first, [prompt(seed, 20) for seed in range(100, 110)])  # ends the stores
    done = kvtier("export", store, str(file), "--about", "vLLM, kvtier-tiny")
    assert done.exit_code == 0, done.output
    assert f": {NUM_BLOCKS} blocks" in done.stdout
    with engine(connects(host_capacity="256MiB", storage=f"pack://{file}")) as second:
        before = loaded("pack")
        assert one_by_one(second, PROMPTS) == alone["warm"]
        assert loaded("pack") - before == NUM_BLOCKS
        one_by_one(second, [NEW, *(prompt(seed, 20) for seed in range(100, 110))])
        assert count("vllm:kvtier_failed_chunks_total", dst="pack") == 0
        assert count("vllm:kvtier_refused_chunks_total", tier="pack") == 0
