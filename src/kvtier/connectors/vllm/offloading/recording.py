"""vLLM's OffloadingConnector, which also records requests, in the scheduler's process."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvtier.connectors.vllm.shared.recording import RequestRecording, record_settings
from kvtier.connectors.vllm.shared.registry import CONNECTOR_NAME

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

Finished = tuple[bool, dict[str, Any] | None]
"""Whether vLLM is to keep the request's blocks for now, and what it is to answer with."""


class RecordedConnector(OffloadingConnector):
    """vLLM's OffloadingConnector, which also records requests if its settings enable it."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        record_settings(extra)  # refused before vLLM's own half is made
        super().__init__(vllm_config, role, kv_cache_config)
        self._recording: RequestRecording | None = None
        if role is not KVConnectorRole.SCHEDULER:
            return
        config = self.scheduler.config
        self._recording = RequestRecording(
            extra,
            max(each.tokens_per_chunk for each in config.kv_group_configs),
            config.tokens_per_hash,
            vllm_config.parallel_config.data_parallel_index,
        )

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        if self._recording is not None:
            self._recording.begin(request)

    def request_finished(self, request: Request, block_ids: list[int]) -> Finished:
        self._record(request)
        finished: Finished = super().request_finished(request, block_ids)
        return finished

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> Finished:
        self._record(request)
        finished: Finished = super().request_finished_all_groups(request, block_ids)
        return finished

    def _record(self, request: Request) -> None:
        if self._recording is not None:
            self._recording.end(request)

    def shutdown(self) -> None:
        super().shutdown()
        if self._recording is not None:
            self._recording.close()


RecordedConnector.__name__ = CONNECTOR_NAME


@cache
def recorded(theirs: type[OffloadingConnector]) -> type[RecordedConnector]:
    """The connector that a platform has, recording."""
    if theirs is OffloadingConnector:
        return RecordedConnector
    return type(CONNECTOR_NAME, (RecordedConnector, theirs), {})
