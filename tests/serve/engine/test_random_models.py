"""Models with random weights: shapes, and reproducibility."""

from __future__ import annotations

import pytest
import torch

from kvtier.serve.engine.profile import measure
from kvtier.serve.engine.random_models import RANDOM, random_config, random_module

pytestmark = pytest.mark.engine


def test_the_large_one_has_the_shape_of_llama_3_8b() -> None:
    config = random_config("random-8b", 4096)
    module = random_module("random-8b", config, torch.device("meta"), torch.bfloat16)
    # 8.03 billion, less the two vocabulary matrices of 128,256 and plus those of 4,096 tokens.
    num_parameters = sum(weight.numel() for weight in module.parameters())
    assert num_parameters == 8_030_261_248 - 2 * (128_256 - 4096) * 4096
    assert measure(module, "random-8b").group(16).bytes_per_block == 16 * 128 * 1024
    assert config.max_position_embeddings == 32768


@pytest.mark.parametrize("name", sorted(set(RANDOM) - {"random-8b"}))
def test_weights_are_the_same_every_time_and_disturb_no_other_random_number(name: str) -> None:
    config = random_config(name, 256)
    torch.manual_seed(7)
    made = []
    for _ in range(2):
        module = random_module(name, config, torch.device("cpu"), torch.float32)
        made.append(torch.cat([weight.detach().flatten() for weight in module.parameters()]))
    after = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(3))
    assert torch.equal(*made)
