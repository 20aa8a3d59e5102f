"""Records a vLLM engine's requests, in the scheduler's process.

vLLM names each prefix of a prompt by a hash of its tokens, adapter, images and salt. These hashes,
salted again, are the trace's keys. Tokens are not read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from kvtier.connectors.common.recording import open_recorder, outcome, record_tokens
from kvtier.connectors.vllm.shared.cores import off_compute_cores
from kvtier.connectors.vllm.shared.counts import Counts
from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.observe.specs import VLLM_RECORDED_REQUESTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

SETTINGS = ("record", "record_max_bytes")
"""Settings that are read from the connector's configuration, whichever front uses it."""


def record_settings(extra: Mapping[str, object]) -> VllmSettings:
    """Read ``record`` from the settings of any connector. Raises ``ConfigError``."""
    return VllmSettings.read({name: extra[name] for name in SETTINGS if name in extra})


class RequestRecording:
    """Records requests if the settings enable it; does nothing otherwise.

    extra: settings of the connector. block_tokens: of the largest block. tokens_per_hash: tokens
    that one of vLLM's block hashes names. replica: number of the engine among replicas.
    """

    def __init__(
        self, extra: Mapping[str, object], block_tokens: int, tokens_per_hash: int, replica: int
    ) -> None:
        self._arrivals: dict[str, float] = {}
        self._recorded: Counter[str] = Counter()
        self._recorded_lock = threading.Lock()
        self._key_tokens = record_tokens(block_tokens)
        self._key_hashes = self._key_tokens // tokens_per_hash
        name = f"replica{replica}" if replica else ""
        with off_compute_cores():
            self._recorder = open_recorder(
                record_settings(extra), self._key_tokens, self._count, name
            )

    def begin(self, request: Request) -> None:
        """Note the arrival of a request."""
        if self._recorder is not None:
            # vLLM's own arrival is the time of day, which may be set meanwhile.
            self._arrivals[request.request_id] = time.monotonic()

    def end(self, request: Request) -> None:
        """Record a request that was computed, or begun to be."""
        if self._recorder is None:
            return
        began = self._arrivals.pop(request.request_id, None)
        if not (request.num_computed_tokens or request.num_output_tokens):
            return
        try:
            num_keys = request.num_prompt_tokens // self._key_tokens
            ends = slice(self._key_hashes - 1, num_keys * self._key_hashes, self._key_hashes)
            hashes = request.block_hashes[ends]
            if len(hashes) < num_keys:  # vLLM's block hashes are off
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

    def count_into(self, counts: Counts) -> None:
        """Count the outcomes of requests since the last call."""
        with self._recorded_lock:
            recorded, self._recorded = self._recorded, Counter()
        for name, num in recorded.items():
            counts.add(VLLM_RECORDED_REQUESTS, num, name)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
