"""The scheduler's half of a connector, as vLLM makes it, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from tests.engines.vllm.engines import ENVIRONMENT, MODEL

PAGE = 16
"""Tokens of a block of vLLM's."""
ATTENTION = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=32, dtype=torch.float32)
HASHER = get_request_block_hasher(PAGE, sha256)


def make_config(model: Path = MODEL, **options: Any) -> VllmConfig:
    """Return vLLM's configuration for a model."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        given = EngineArgs(model=str(model), dtype="float32", block_size=PAGE, **options)
        config = given.create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    init_none_hash(sha256)
    return config


def make_half(config: VllmConfig, connects: dict[str, Any], replica: int = 0) -> Any:
    """Return the connector for a value of ``--kv-transfer-config``."""
    config.kv_transfer_config = KVTransferConfig(**connects)
    config.parallel_config.data_parallel_index = replica
    cache = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer.0"], ATTENTION)])
    return KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
