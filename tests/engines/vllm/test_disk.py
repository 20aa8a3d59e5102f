"""A real vLLM on the CPU with kvtier's host and disk tiers: restarts, crashes, faults, load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.engines.vllm.engines import (
    BLOCK,
    Answer,
    Answers,
    Prompt,
    connector,
    count,
    damage,
    engine,
    loaded,
    moved_from_disk,
    one_by_one,
    prompt,
    run,
    with_disk,
)

# 50 tokens beyond the last full block: hits on the device, in host memory and on disk are all
# computed from the same boundary.
PROMPTS = [prompt(seed, 6 * BLOCK + 50) for seed in range(6)]
SHARED = prompt(77, 4 * BLOCK)["prompt_token_ids"]
CROWD: list[Prompt] = [
    {"prompt_token_ids": SHARED[: (1 + seed % 4) * BLOCK] + prompt(seed, 70)["prompt_token_ids"]}
    for seed in range(100, 300)
]
"""200 prompts that share one to four blocks."""


@pytest.fixture(scope="module")
def slab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slab")


@pytest.mark.timeout(600)
def test_kv_comes_from_host_and_after_a_restart_from_disk(alone: Answers, slab: Path) -> None:
    with engine(with_disk(slab, load_policy="always")) as llm:
        assert one_by_one(llm, PROMPTS) == alone["cold"]
        assert llm.reset_prefix_cache()
        before = {tier: loaded(tier) for tier in ("host", "disk")}
        assert one_by_one(llm, PROMPTS) == alone["warm"]
        assert (loaded("host") - before["host"], loaded("disk") - before["disk"]) == (36, 0)
    with engine(with_disk(slab, load_policy="always")) as llm:
        before = {tier: loaded(tier) for tier in ("host", "disk")}
        assert one_by_one(llm, PROMPTS) == alone["warm"]
        assert (loaded("host") - before["host"], loaded("disk") - before["disk"]) == (0, 36)
        assert count("vllm:kvtier_moved_bytes_total", src="disk", dst="host") > 0


@pytest.mark.timeout(600)
def test_damaged_slab_is_computed_again(alone: Answers, slab: Path) -> None:
    damage(slab / "rank0" / "data.slab")
    with engine(with_disk(slab)) as llm:
        assert one_by_one(llm, PROMPTS) == alone["cold"]
        assert one_by_one(llm, PROMPTS) == alone["warm"]
        assert count("vllm:kvtier_failed_chunks_total", src="disk") >= 6


@pytest.mark.timeout(600)
def test_engine_killed_while_it_stores_starts_again_and_is_right(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.engines.vllm.storing", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("answered 3"):
                break  # its stores are still in flight
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    prompts = [prompt(10 * seed + each, 6 * BLOCK + 50) for seed in range(4) for each in range(4)]
    with engine(with_disk(tmp_path, host_capacity="64MiB", disk_capacity="64MiB")) as llm:
        found = one_by_one(llm, prompts)
        assert any(cached for cached, _ in found), "nothing survived"
        assert llm.reset_prefix_cache(reset_connector=True)
        cold = one_by_one(llm, prompts)
        assert llm.reset_prefix_cache()
        warm = one_by_one(llm, prompts)
    for (cached, answer), (_, computed), (num, reused) in zip(found, cold, warm, strict=True):
        # Where all of it was found the boundary is that of a hit, and the bits are, too.
        assert answer[0] == computed[0]
        assert cached < num or answer == reused


@contextmanager
def _small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    """Mount a file system of that size."""
    size = f"size={megabytes}m,mode=0700"
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(path)], check=False)
    if made.returncode:
        pytest.skip("may not mount here")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.timeout(600)
def test_full_disk_is_no_reason_to_stop(alone: Answers, tmp_path: Path) -> None:
    """Blocks and journal have reserved their space."""
    config = with_disk(tmp_path, disk_capacity="16MiB")
    with _small_disk(tmp_path, 20) as folder, engine(config) as llm:
        with (folder / "filler").open("ab", 0) as filler, suppress(OSError):
            while True:
                filler.write(b"f" * 4096)
        failed = count("vllm:kvtier_failed_chunks_total", src="host", dst="disk")
        assert one_by_one(llm, PROMPTS) == alone["cold"]
        for seed in range(1000, 1020):
            run(llm, prompt(seed, 6 * BLOCK + 50))
        assert count("vllm:kvtier_failed_chunks_total", src="host", dst="disk") == failed
        assert llm.reset_prefix_cache()
        assert one_by_one(llm, PROMPTS) == alone["warm"]


@pytest.mark.timeout(900)
def test_kv_comes_directly_from_disk(
    alone: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Blocks bypass host memory: all of them, or the excess. Damaged blocks are detected."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")  # vLLM's memory begins at a page
    with engine(with_disk(tmp_path)) as llm:
        one_by_one(llm, PROMPTS)
    num_bytes = 36 * 5 * (128 << 10)  # 36 blocks in 5 pieces of 128 KiB
    with engine(with_disk(tmp_path, disk_direct="on")) as llm:
        before = moved_from_disk()
        assert one_by_one(llm, PROMPTS) == alone["warm"]
        assert moved_from_disk(before) == (num_bytes, 0)
    # 3 blocks, of 6 in a prompt
    with engine(with_disk(tmp_path, disk_direct="auto", host_capacity="2MiB")) as llm:
        before = moved_from_disk()
        assert one_by_one(llm, PROMPTS) == alone["warm"]
        assert moved_from_disk(before) == (num_bytes / 2, num_bytes / 2)
    damage(tmp_path / "rank0" / "data.slab")
    with engine(with_disk(tmp_path, disk_direct="on")) as llm:
        failed = count("vllm:kvtier_failed_chunks_total", src="disk", dst="device")
        assert one_by_one(llm, PROMPTS) == alone["cold"]
        now = count("vllm:kvtier_failed_chunks_total", src="disk", dst="device")
        assert now - failed >= 6


@pytest.mark.timeout(600)
def test_disk_that_answers_nothing_holds_nobody_up(alone: Answers, tmp_path: Path) -> None:
    """Its reads go to host memory and can be abandoned; reads into vLLM's pages could not."""
    with engine(with_disk(tmp_path)) as llm:
        one_by_one(llm, PROMPTS)
    silent = {"spec_name": "SilentDiskSpec", "spec_module_path": "tests.engines.vllm.faulty"}
    with engine(with_disk(tmp_path, **silent)) as llm:
        assert one_by_one(llm, PROMPTS) == alone["cold"]
    assert (tmp_path / "asked").exists()


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("direct", ["off", "on"])
def test_two_ranks_find_their_shards_after_a_restart(
    direct: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each rank has half of the heads and a slab of its own; the scheduler decides for both."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")  # where on, vLLM's memory begins at a page
    config = with_disk(tmp_path, disk_direct=direct)
    with engine(config, tensor_parallel_size=2) as llm:
        one_by_one(llm, PROMPTS)
        on_device = one_by_one(llm, PROMPTS)
        assert [cached for cached, _ in on_device] == [6 * BLOCK] * len(PROMPTS)
        assert llm.reset_prefix_cache()
        assert one_by_one(llm, PROMPTS) == on_device
    with engine(config, tensor_parallel_size=2) as llm:
        before = moved_from_disk()
        assert one_by_one(llm, PROMPTS) == on_device
        assert loaded("disk") > 0
        past_host, through = moved_from_disk(before)
        assert (past_host > 0, through > 0) == (direct == "on", direct == "off")
    assert (tmp_path / "rank0" / "data.slab").stat().st_size <= 128 << 20, "half for each"
    assert (tmp_path / "rank1" / "data.slab").exists()


@pytest.mark.timeout(600)
def test_crowd_that_shares_prefixes(tmp_path: Path) -> None:
    """200 prompts at once, more than the device pool holds: first computed, then from the disk."""
    with engine(None) as llm:
        alone = run(llm, *CROWD)
    with engine(with_disk(tmp_path)) as llm:
        _same_tokens(run(llm, *CROWD), alone)
    with engine(with_disk(tmp_path)) as llm:
        found = run(llm, *CROWD)
        _same_tokens(found, alone)
        assert all(cached >= BLOCK for cached, _ in found)


def _same_tokens(found: list[tuple[int, Answer]], expected: list[tuple[int, Answer]]) -> None:
    """Compare tokens: the same prompts in other batches may differ in the last bits of a sum."""
    for (_, answer), (_, right) in zip(found, expected, strict=True):
        assert answer[0][0] == right[0][0]
        for step, rightly in zip(answer[1][:1], right[1][:1], strict=True):
            for token in step.keys() & rightly.keys():
                assert abs(step[token] - rightly[token]) < 1e-3


@pytest.mark.timeout(600)
def test_copies_that_fail_are_computed(alone: Answers) -> None:
    faulty = connector(
        host_capacity="256MiB", spec_name="FaultySpec", spec_module_path="tests.engines.vllm.faulty"
    )
    with engine(faulty) as llm:
        assert one_by_one(llm, PROMPTS) == alone["cold"]  # every second store fails
        assert llm.reset_prefix_cache()
        found = one_by_one(llm, PROMPTS)
        for at, (cached, answer) in enumerate(found):
            assert cached in (0, 6 * BLOCK)
            assert (cached, answer) == alone["warm" if cached else "cold"][at]
        assert {cached for cached, _ in found} == {0, 6 * BLOCK}, "some loads fail, some do not"
