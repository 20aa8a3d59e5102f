"""vLLM's MultiConnector with metrics of kvtier's OffloadingConnector among those of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvtier.connectors.vllm.offloading.spec import KvtierSpec
from kvtier.connectors.vllm.shared.multi import RecomputingMulti
from kvtier.connectors.vllm.shared.registry import CONNECTOR_NAME, offloading_class

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics


class KvtierMultiConnector(RecomputingMulti):
    """``RecomputingMulti`` with the metrics of all specs under the OffloadingConnectors inside."""

    @classmethod
    def _get_connector_classes_and_configs(
        cls, vllm_config: VllmConfig
    ) -> list[tuple[type, VllmConfig]]:
        """Return vLLM's classes, with one class for all OffloadingConnectors.

        vLLM makes the metrics of each class, and two classes of this connector have the same ones.
        """
        return [
            (offloading_class(kind) if _is_offloading(config) else kind, config)
            for kind, config in super()._get_connector_classes_and_configs(vllm_config)
        ]

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *arguments: Any) -> KVConnectorPromMetrics:
        """Add the metrics of kvtier's spec to vLLM's.

        vLLM makes the metrics of a connector class from the first connector of that class. This
        method adds the metrics that only the specs of the others have.
        """
        made = super().build_prom_metrics(vllm_config, *arguments)
        offloading = made._prom_metrics.get(CONNECTOR_NAME)
        extras = [dict(extra_config) for extra_config in _extra_configs(cls, vllm_config)]
        specs = [OffloadingSpecFactory.get_spec_cls(extra) for extra in extras]
        if offloading is None or not any(issubclass(spec, KvtierSpec) for spec in specs):
            return made
        for spec, extra in zip(specs, extras, strict=True):
            for name, metadata in spec.build_metric_definitions(extra).items():
                if name not in offloading._offloading_metric_defs:
                    offloading._offloading_metric_metadata[name] = metadata
                    metric = offloading._create_metric(name, metadata)
                    offloading._offloading_metric_defs[name] = metric
        return made


def _extra_configs(
    multi: type[MultiConnector], vllm_config: VllmConfig
) -> list[Mapping[str, object]]:
    """Settings of all OffloadingConnectors inside."""
    return [
        config.kv_transfer_config.kv_connector_extra_config
        for _, config in multi._get_connector_classes_and_configs(vllm_config)
        if _is_offloading(config)
    ]


def _is_offloading(config: VllmConfig) -> bool:
    named: bool = config.kv_transfer_config.kv_connector == CONNECTOR_NAME
    return named and not config.kv_transfer_config.kv_connector_module_path
