"""vLLM's OffloadingConnector, recording what the engine was asked: in the scheduler's process.

vLLM names each prefix of a prompt by a hash of its tokens, adapter, images and salt: these, salted
again, are the trace's keys. Tokens are not looked at.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvtier.connectors.common.recording import open_recorder, outcome, record_tokens
from kvtier.connectors.vllm.cores import off_compute_cores
from kvtier.connectors.vllm.registry import CONNECTOR_NAME
from kvtier.connectors.vllm.settings import VllmSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvtier.recording import Recorder

logger = logging.getLogger(__name__)

Finished = tuple[bool, dict[str, Any] | None]
"""Whether vLLM is to keep the request's blocks for now, and what it is to answer with."""
SETTINGS = ("record", "record_max_bytes")
"""Settings that are read from the connector's configuration, whichever front uses it."""


class RecordedConnector(OffloadingConnector):
    """Records requests where its settings say so, and is vLLM's own beside that."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        settings = record_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._recorder: Recorder | None = None
        self._arrivals: dict[str, float] = {}
        self._recorded: Counter[str] = Counter()
        self._recorded_lock = threading.Lock()
        if role is not KVConnectorRole.SCHEDULER:
            return
        config = self.scheduler.config
        block_tokens = max(each.tokens_per_chunk for each in config.kv_group_configs)
        self._key_tokens = record_tokens(block_tokens)
        self._key_hashes = self._key_tokens // config.tokens_per_hash
        index = vllm_config.parallel_config.data_parallel_index
        replica = f"replica{index}" if index else ""
        with off_compute_cores():
            self._recorder = open_recorder(settings, self._key_tokens, self._count, replica)

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        if self._recorder is not None:
            # vLLM's own arrival is the time of day, which may be set meanwhile.
            self._arrivals[request.request_id] = time.monotonic()

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

    def shutdown(self) -> None:
        super().shutdown()
        if self._recorder is not None:
            self._recorder.close()

    def _record(self, request: Request) -> None:
        """One that was computed, or begun to be."""
        if self._recorder is None:
            return
        began = self._arrivals.pop(request.request_id, None)
        if not (request.num_computed_tokens or request.num_output_tokens):
            return
        try:
            num_keys = request.num_prompt_tokens // self._key_tokens
            ends = slice(self._key_hashes - 1, num_keys * self._key_hashes, self._key_hashes)
            hashes = request.block_hashes[ends]
            if len(hashes) < num_keys:  # vLLM was told to hash nothing
                self._count(False)
                return
            self._recorder.offer_hashes(
                time.monotonic() if began is None else began,
                hashes,
                request.num_prompt_tokens,
                request.num_output_tokens,
            )
        except Exception:
            logger.exception("kvtier: a request was not recorded")

    def _count(self, written: bool) -> None:
        with self._recorded_lock:
            self._recorded[outcome(written)] += 1

    def take_recorded(self) -> Mapping[str, int]:
        """Requests by outcome, since the last call."""
        with self._recorded_lock:
            recorded, self._recorded = self._recorded, Counter()
        return recorded


RecordedConnector.__name__ = CONNECTOR_NAME


def record_settings(extra: Mapping[str, object]) -> VllmSettings:
    """Read ``record`` from the settings of any connector. Raises ``ConfigError``."""
    return VllmSettings.read({name: extra[name] for name in SETTINGS if name in extra})


@cache
def recorded(theirs: type[OffloadingConnector]) -> type[RecordedConnector]:
    """The connector that a platform has, recording."""
    if theirs is OffloadingConnector:
        return RecordedConnector
    return type(CONNECTOR_NAME, (RecordedConnector, theirs), {})
