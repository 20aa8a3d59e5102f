"""Real servers: pages that they find on disk, or in host memory, equal the computed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from tests.engines.sglang.models import model_of
from tests.engines.sglang.servers import FRONTS, LONG, NUM_WHOLE, PAGE, prompt, server
from tests.kit.waiting import wait_until

LAYOUTS = {1: ("page_first", "kernel"), 2: ("page_first_direct", "direct")}
"""By number of ranks: layout of host memory, and the way to copy that goes with it."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", ["mha-1", "mha-2", "mla-1", "mla-2", "mha-1-encrypted"])
@pytest.mark.parametrize("front", FRONTS)
def test_pages_come_back_after_a_flush_and_after_a_kill(
    tmp_path: Path, front: str, case: str
) -> None:
    folder, log = tmp_path / "slab", tmp_path / "log"
    kind, ranks, *coding = case.split("-")
    num_ranks, settings = int(ranks), {}
    if coding:
        pytest.importorskip("cryptography")
        (tmp_path / "keys").write_text("0a" * 32)
        settings = {"encryption_key": f"file:{tmp_path / 'keys'}"}
    options = [*FRONTS[front](folder, **settings)]
    num_slabs = num_ranks
    if front == "storage":
        layout, way = LAYOUTS[num_ranks]
        options += ["--hicache-mem-layout", layout, "--hicache-io-backend", way]
        num_slabs = num_ranks if kind == "mha" else 1
    model = model_of(kind, tmp_path)
    prompts = [prompt(seed, LONG) for seed in range(3)]
    with server(log, *options, model=model, num_ranks=num_ranks) as first:
        # KV of a prompt's last token differs by rounding if it is computed behind a hit instead of
        # with the whole prompt. The device therefore has no more tokens than a hit may have.
        for tokens in prompts:
            assert first.ask(tokens[:NUM_WHOLE]).num_cached == 0
        warm = [first.ask(tokens) for tokens in prompts]
        first.settle(folder, num_slabs * len(prompts) * (LONG // PAGE))
        first.flush()
        flushed = [first.ask(tokens) for tokens in prompts]
        first.kill()
    superblocks = [path.read_bytes() for path in folder.rglob("superblock")]
    assert [b" encrypted" in superblock for superblock in superblocks] == [bool(coding)] * num_slabs
    with server(log, *options, model=model, num_ranks=num_ranks) as second:
        restarted = [second.ask(tokens) for tokens in prompts]
    for answers in (warm, flushed, restarted):
        assert [answer.num_cached for answer in answers] == [NUM_WHOLE] * len(prompts)
        assert [answer.logprobs for answer in answers] == [answer.logprobs for answer in warm]
    if front == "storage":
        stored = [answer.num_stored for answer in (*warm, *flushed, *restarted)]
        assert stored == [0] * len(prompts) + [NUM_WHOLE] * 2 * len(prompts)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("front", FRONTS)
def test_audits_of_a_server_without_faults_find_no_difference(tmp_path: Path, front: str) -> None:
    folder, prompts = tmp_path / "slab", [prompt(seed, LONG) for seed in range(3)]
    options = (*FRONTS[front](folder, audit=1.0), "--enable-metrics")
    with server(tmp_path / "log", *options) as it:

        def audits(*outcomes: str) -> float:
            found = it.metrics("kvtier_audits_total")
            return sum(number for labels, number in found if labels["outcome"] in outcomes)

        for tokens in prompts:
            it.ask(tokens[:NUM_WHOLE])
        warm = [it.ask(tokens) for tokens in prompts]
        it.settle(folder, len(prompts) * (LONG // PAGE))
        it.flush()
        audited = []
        for tokens in prompts:
            audited.append(it.ask(tokens))
            # Recomputed pages were computed in other pieces than before: they may round otherwise.
            wait_until(lambda: audits("equal", "within_tolerance") == len(audited), "audit ends")
        assert audits("different", "skipped") == 0
    assert all(answer.num_cached < NUM_WHOLE for answer in audited)
    assert [answer.tokens for answer in audited] == [answer.tokens for answer in warm]
