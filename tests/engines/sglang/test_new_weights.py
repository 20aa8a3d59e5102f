"""A real server whose weights are replaced while it serves finds no pages of the old ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from safetensors.torch import load_file, save_file

from tests.engines.sglang.servers import FRONTS, MODEL, PAGE, prompt, server

LONG = 10 * PAGE + 30
NUM_WHOLE = (LONG - 1) // PAGE * PAGE


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("front", FRONTS)
def test_updated_weights_never_meet_pages_of_the_old_ones(tmp_path: Path, front: str) -> None:
    others = shutil.copytree(MODEL, tmp_path / "others")
    file = others / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if ".k_proj." in name or ".v_proj." in name:
            tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    folder, text = tmp_path / "slab", prompt(1, LONG)
    with server(tmp_path / "log", *FRONTS[front](folder)) as running:
        old = running.ask(text)
        running.settle(folder, LONG // PAGE)
        running.flush()
        assert running.ask(text).num_cached == NUM_WHOLE, "kvtier has it"

        running.update_weights(others, flush_cache=False)
        running.ask(text)  # SGLang's own cache, which has not been emptied
        running.flush()
        new = running.ask(text)
        assert new.num_cached == 0, "what came from SGLang's own cache is not kept"
        assert new.logprobs != old.logprobs
        running.settle(folder, 2 * (LONG // PAGE))
        running.flush()
        again = running.ask(text)
        assert (again.num_cached, again.tokens) == (NUM_WHOLE, new.tokens)

        running.update_weights(MODEL)
        back = running.ask(text)
        assert (back.num_cached, back.logprobs) == (0, old.logprobs)
