"""Checkpoints of the built-in model, for tests to change or to damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kvtier.engine.model_names import BUILTIN
from kvtier.engine.models import DEFAULT

Tensors = dict[str, torch.Tensor]


def checkpoint(folder: Path, **changes: object) -> Path:
    """Return a copy of the built-in model; ``changes`` replace fields of its config.json."""
    shutil.copytree(BUILTIN / DEFAULT, folder)
    change_json(folder / "config.json", **changes)
    return folder


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(model: Path, change: Callable[[Tensors], object]) -> None:
    """Save the weights again, as ``change`` leaves them."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
