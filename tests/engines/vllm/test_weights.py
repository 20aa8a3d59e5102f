"""A real vLLM finds KV on disk only under the weights that computed it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.engines.vllm.engines import BLOCK, MODEL, engine, one_by_one, prompt, with_disk

PROMPTS = [prompt(700 + seed, 6 * BLOCK + 50) for seed in range(2)]


def _cached(slab: Path, model: Path, **changes: Any) -> list[int]:
    """Return how many tokens of each prompt a start of vLLM finds; it stores missing blocks."""
    with engine(with_disk(slab), model, **changes) as llm:
        return [cached for cached, _ in one_by_one(llm, PROMPTS)]


def _replace_weights(file: Path) -> None:
    """Change all weights of K and V in place; keep the file's size and time."""
    before = file.stat()
    tensors = load_file(file)
    for name in tensors:
        if ".k_proj." in name or ".v_proj." in name:
            tensors[name] = tensors[name].flip(0).contiguous()
    changed = file.with_name("changed")
    save_file(tensors, changed, metadata={"format": "pt"})
    content = changed.read_bytes()
    changed.unlink()
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.timeout(600)
def test_weights_replaced_in_place_find_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    for file in model.iterdir():
        os.utime(file, (1, 1))  # as in an image that can be built again
    moved = tmp_path / "moved"
    shutil.copytree(model, moved)
    slab = tmp_path / "slab"
    assert _cached(slab, model) == [0, 0]
    assert _cached(slab, moved) == [6 * BLOCK] * 2, "equal weights in another place"
    _replace_weights(model / "model.safetensors")
    assert _cached(slab, model) == [0, 0]
    assert _cached(slab, moved) == [6 * BLOCK] * 2


@pytest.mark.timeout(600)
def test_random_weights_of_a_models_shape_find_nothing(tmp_path: Path) -> None:
    assert _cached(tmp_path, MODEL) == [0, 0]
    assert _cached(tmp_path, MODEL, load_format="dummy") == [0, 0]
    assert _cached(tmp_path, MODEL, hf_overrides={"rope_theta": 123.0}) == [0, 0]
    assert _cached(tmp_path, MODEL) == [6 * BLOCK] * 2


PLUGIN = {
    "acme_models/__init__.py": """
def register():
    from vllm import ModelRegistry

    ModelRegistry.register_model("Qwen3ForCausalLM", "acme_models.model:Scaled")
""",
    "acme_models/model.py": """
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM


class Scaled(Qwen3ForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)
""",
    "acme_models-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme-models\nVersion: 1\n",
    "acme_models-1.dist-info/entry_points.txt": """
[vllm.general_plugins]
acme = acme_models:register
""",
}


@pytest.mark.timeout(900)
def test_model_of_a_plug_in_that_was_changed_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, slab = tmp_path / "site", tmp_path / "slab"
    for name, text in PLUGIN.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(site))
    assert _cached(slab, MODEL) == [0, 0]
    assert _cached(slab, MODEL) == [6 * BLOCK] * 2
    model = site / "acme_models/model.py"
    model.write_text(model.read_text() + "    scale = 2\n")
    assert _cached(slab, MODEL) == [0, 0]
