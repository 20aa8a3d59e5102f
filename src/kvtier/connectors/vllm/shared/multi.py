"""vLLM's MultiConnector with kvtier as one of the connectors inside.

Each connector inside gets a copy of the configuration, but vLLM's scheduler reads the outer one.
Settings that a connector inside changes for the scheduler are therefore copied to the outer one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig


class RecomputingMulti(MultiConnector):
    """MultiConnector that has failed loads recomputed where a connector inside wants that.

    kvtier's connectors want it, at any depth. Without one of them it is vLLM's own.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        inside = self._ktc_kv_transfer_config
        if any(config.kv_load_failure_policy == "recompute" for config in inside):
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
