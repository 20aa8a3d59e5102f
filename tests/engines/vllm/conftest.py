"""A request's illegal change of phase fails the test."""

from __future__ import annotations

from kvtier.connectors.vllm.shared.request_state import RequestState

RequestState.is_strict = True
