"""Real servers: pages that they find on disk equal the computed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from tests.engines.sglang.models import make_mla
from tests.engines.sglang.servers import (
    MODEL,
    PAGE,
    Answer,
    Server,
    linker,
    prompt,
    server,
    storage,
)

LONG = 20 * 64 + 30
"""Tokens of a prompt: its last page is not full."""
NUM_WHOLE = (LONG - 1) // PAGE * PAGE
"""Tokens that a hit may have: one is always computed."""
LAYOUTS = {1: ("page_first", "kernel"), 2: ("page_first_direct", "direct")}
"""And the way to copy that goes with it, by the number of ranks."""


def _check_stored(answer: Answer, device: Answer) -> None:
    """Check that an answer's KV came from storage, and equals the device's."""
    assert answer.num_stored == NUM_WHOLE
    assert answer.logprobs == device.logprobs


def _warm(running: Server, prompts: list[list[int]]) -> list[Answer]:
    """Return each prompt's answer when the device has the tokens that a hit may have.

    KV of a prompt's last token differs by rounding if it is computed behind a hit instead of with
    the whole prompt. The device therefore has no more tokens.
    """
    cold = [running.ask(each[:NUM_WHOLE]) for each in prompts]
    assert [each.num_cached for each in cold] == [0] * len(prompts)
    warm = [running.ask(each) for each in prompts]
    assert [(each.num_cached, each.num_stored) for each in warm] == [(NUM_WHOLE, 0)] * len(prompts)
    return warm


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_come_from_disk_after_a_flush_and_after_a_kill(
    tmp_path: Path, kind: str, num_ranks: int
) -> None:
    folder, log = tmp_path / "slab", tmp_path / "log"
    model = MODEL if kind == "mha" else make_mla(tmp_path / "mla")
    options = [*storage(folder), "--tp-size", str(num_ranks)]
    layout, way = LAYOUTS[num_ranks]
    options += ["--hicache-mem-layout", layout, "--hicache-io-backend", way]
    how: Any = {"model": model, "cores": "|".join(map(str, range(num_ranks)))}
    prompts = [prompt(seed, LONG) for seed in range(3)]
    num_slabs = num_ranks if kind == "mha" else 1
    with server(log, *options, **how) as first:
        warm = _warm(first, prompts)
        first.settle(folder, num_slabs * len(prompts) * (LONG // PAGE))
        first.flush()
        flushed = [first.ask(each) for each in prompts]
        first.kill()
    assert len(list(folder.iterdir())) == num_slabs
    with server(log, *options, **how) as second:
        restarted = [second.ask(each) for each in prompts]
    for device, *stored in zip(warm, flushed, restarted, strict=True):
        for answer in stored:
            _check_stored(answer, device)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_linker_has_pages_after_a_flush_and_after_a_kill(
    tmp_path: Path, kind: str, num_ranks: int
) -> None:
    folder, log = tmp_path / "slab", tmp_path / "log"
    model = MODEL if kind == "mha" else make_mla(tmp_path / "mla")
    options = [*linker(folder), "--tp-size", str(num_ranks)]
    how: Any = {"model": model, "cores": "|".join(map(str, range(num_ranks)))}
    prompts = [prompt(seed, LONG) for seed in range(3)]
    with server(log, *options, **how) as first:
        warm = _warm(first, prompts)
        first.settle(folder, num_ranks * len(prompts) * (LONG // PAGE))
        first.flush()
        flushed = [first.ask(each) for each in prompts]
        first.kill()
    assert len(list(folder.iterdir())) == num_ranks
    with server(log, *options, **how) as second:
        restarted = [second.ask(each) for each in prompts]
    for device, *found in zip(warm, flushed, restarted, strict=True):
        for answer in found:
            assert answer.num_cached == NUM_WHOLE
            assert answer.logprobs == device.logprobs
