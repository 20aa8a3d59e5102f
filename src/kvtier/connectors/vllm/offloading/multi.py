"""vLLM's MultiConnector with kvtier as one of the connectors inside.

Each connector inside gets a copy of the configuration, and vLLM's scheduler reads the outer one: so
what kvtier asks of the scheduler has to be passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvtier.connectors.vllm.offloading.connector import KvtierOffloadingConnector
from kvtier.connectors.vllm.offloading.spec import KvtierSpec
from kvtier.connectors.vllm.registry import CONNECTOR_NAME

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KvtierMultiConnector(MultiConnector):
    """Has failed loads recomputed where kvtier is inside, at any depth; else it is vLLM's own."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if _has_kvtier(self):
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *arguments: Any) -> KVConnectorPromMetrics:
        """As vLLM's, which makes the metrics of a class for the first connector of that class.

        With those that only another spec has.
        """
        made = super().build_prom_metrics(vllm_config, *arguments)
        offloading = made._prom_metrics.get(CONNECTOR_NAME)
        extras = [dict(each) for each in _extra_configs(cls, vllm_config)]
        specs = [OffloadingSpecFactory.get_spec_cls(each) for each in extras]
        if offloading is None or not any(issubclass(each, KvtierSpec) for each in specs):
            return made
        for spec, extra in zip(specs, extras, strict=True):
            for name, metadata in spec.build_metric_definitions(extra).items():
                if name not in offloading._offloading_metric_defs:
                    offloading._offloading_metric_metadata[name] = metadata
                    metric = offloading._create_metric(name, metadata)
                    offloading._offloading_metric_defs[name] = metric
        return made


def _has_kvtier(multi: MultiConnector) -> bool:
    return any(
        isinstance(each, KvtierOffloadingConnector)
        or (isinstance(each, MultiConnector) and _has_kvtier(each))
        for each in multi.sub_connectors
    )


def _extra_configs(
    multi: type[MultiConnector], vllm_config: VllmConfig
) -> list[Mapping[str, object]]:
    """Settings of all OffloadingConnectors inside."""
    return [
        config.kv_transfer_config.kv_connector_extra_config
        for _, config in multi._get_connector_classes_and_configs(vllm_config)
        if config.kv_transfer_config.kv_connector == CONNECTOR_NAME
    ]


@cache
def over_multi(theirs: type[MultiConnector]) -> type[MultiConnector]:
    """Ours, derived from the MultiConnector that is in vLLM's table."""
    bases = (KvtierMultiConnector,)
    return type("MultiConnector", bases if theirs is MultiConnector else (*bases, theirs), {})
