"""A connector that does nothing, to measure vLLM's own cost of any connector."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class Nothing(KVConnectorBase_V1, SupportsHMA):
    """Every method that vLLM requires, and no more."""

    def get_num_new_matched_tokens(self, *arguments: Any) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, *arguments: Any) -> None:
        """Nothing was allocated for it."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, *arguments: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, *arguments: Any, **more: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
