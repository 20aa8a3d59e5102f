"""Steps of vLLM's real scheduler and of a rank's half of a connector, without a model.

    schedule() -- pickled --> rank: pre_forward, each layer, post_forward
    update_from_output() <-- pickled -- ModelRunnerOutput, a token per request

The scheduler is that of vLLM's engine core. vLLM's own ``ActiveKVConnector`` calls the rank's half.
Both run in one process here, and each is timed by itself, by the CPU time of the thread.
"""

from __future__ import annotations

import os
import pickle
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvtier

PAGE = 16
"""Tokens of a vLLM block, as on accelerators."""
PROMPT = 2 * PAGE
PAGES = 8
"""Blocks of a request: its prompt and the generated tokens."""
LAYERS = 32
TOKEN = 77
"""The token that is always generated."""
HEAD = 8
MODEL = Path(kvtier.__file__).parent / "serve/engine/builtin/kvtier-tiny"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONHASHSEED": "0",
}
SCHEDULER = (
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "take_events",
)
RANK = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "finish_forward",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
"""Functions of a connector that vLLM calls in every step."""
PENDING_S = 0.002
PENDING_POLLS = 1000

cpu_ns = time.thread_time_ns


@dataclass(frozen=True, slots=True)
class Step:
    """Nanoseconds of CPU time in each process, and bytes of the messages there and back."""

    scheduler: int
    rank: int
    num_bytes: tuple[int, int]


class Functions:
    """CPU time in functions of one half of a connector, while ``is_on``."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.is_on = False
        self.taken: defaultdict[str, int] = defaultdict(int)
        self._names = names

    def wrap(self, connector: Any) -> None:
        for name in self._names:
            if hasattr(connector, name):
                setattr(connector, name, self._timed(name, getattr(connector, name)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **more: Any) -> Any:
            if not self.is_on:
                return function(*arguments, **more)
            began = cpu_ns()
            result = function(*arguments, **more)
            if name == "take_events":  # a generator
                result = iter(list(result))
            self.taken[name] += cpu_ns() - began - CLOCK_NS
            return result

        return timed

    def take(self) -> dict[str, int]:
        taken, self.taken = dict(self.taken), defaultdict(int)
        return taken


def _clock_ns() -> int:
    """Return the nanoseconds that reading the clock adds to a span of time."""
    spans = []
    for _ in range(1001):
        began = cpu_ns()
        spans.append(cpu_ns() - began)
    return sorted(spans)[len(spans) // 2]


CLOCK_NS = _clock_ns()


class AtOnce:
    """Replacement of vLLM's worker for host memory, which needs an accelerator: copies nothing."""

    def __init__(self) -> None:
        self._done: list[int] = []

    def submit_store(self, job_id: int, *specs: object) -> bool:
        self._done.append(job_id)
        return True

    submit_load = submit_store

    def get_finished(self) -> list[Any]:
        if not self._done:
            return []
        from vllm.v1.kv_offload.base import TransferResult

        done, self._done = self._done, []
        return [TransferResult(job_id, True, 1, 1e-6) for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is in flight."""

    def shutdown(self) -> None:
        """Nothing has to be released."""


class Replica:
    """A scheduler and one rank.

    Args:
        connects: content of ``--kv-transfer-config``; None for no connector.
        num_running: requests that run at a time.
        options: further ones of vLLM.
    """

    def __init__(
        self, connects: Mapping[str, Any] | None, num_running: int, **options: Any
    ) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.structured_output import StructuredOutputManager

        self._num_running = num_running
        connector = None if connects is None else KVTransferConfig(**connects)
        given: dict[str, Any] = {
            "max_num_batched_tokens": max(4096, num_running * PROMPT),
            "max_model_len": 4096,
            **options,
        }
        config = EngineArgs(
            kv_transfer_config=connector,
            model=str(MODEL),
            dtype="float32",
            block_size=PAGE,
            max_num_seqs=num_running,
            **given,
        ).create_engine_config()
        if options.get("async_scheduling"):  # vLLM switches it off on the CPU
            config.scheduler_config.async_scheduling = True
        config.cache_config.kv_cache_layout = "LBHNC"
        num_blocks = config.cache_config.num_gpu_blocks = num_running * (PAGES + 1) + 64
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(PAGE, sha256)
        self._config, self._cache = config, _cache(num_blocks)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=self._cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=PAGE,
            log_stats=True,
        )
        self.functions = {"scheduler": Functions(SCHEDULER), "rank": Functions(RANK)}
        self._make_rank(connects, num_blocks)
        self._num_rounds = 0

    def _make_rank(self, connects: Mapping[str, Any] | None, num_blocks: int) -> None:
        import torch
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector, KVConnector

        self._half: Any = None
        self._aggregator: Any = None
        self._rank: Any = KVConnector()
        if connects is None:
            return
        self.functions["scheduler"].wrap(self.scheduler.connector)
        self._half = KVConnectorFactory.create_connector(
            self._config, KVConnectorRole.WORKER, self._cache
        )
        if "cpu_bytes_to_use" in connects.get("kv_connector_extra_config", {}):
            self._half.connector_worker.spec.get_worker = lambda caches: AtOnce()
        before = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = self._half
        shape = (num_blocks, 1, PAGE, 2 * HEAD)
        self._layers = {name: torch.zeros(shape) for name in _layer_names()}
        self._rank = ActiveKVConnector(self._config, self._layers)
        kv_transfer_state._KV_CONNECTOR_AGENT = before
        self.functions["rank"].wrap(self._half)
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, 1)

    @property
    def is_pending(self) -> bool:
        """Whether the connector moves something."""
        connector = self.scheduler.connector
        return connector is not None and bool(connector.has_pending_push_work())

    def settle(self) -> None:
        """Take steps until nothing moves."""
        for _ in range(PENDING_POLLS):
            if not self.is_pending:
                return
            time.sleep(PENDING_S)
            self.step()
        raise TimeoutError("something is always on its way")

    def begin(self, *num_tokens: int) -> None:
        """Add requests with new prompts of so many tokens; by default, as many as may run."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._num_rounds += 1
        rng = random.Random(self._num_rounds)
        for number, num in enumerate(num_tokens or (PROMPT,) * self._num_running):
            params = SamplingParams(max_tokens=4000, ignore_eos=True)
            name = f"chatcmpl-{self._num_rounds}-{number:032x}"
            tokens = [rng.randrange(10, 4000) for _ in range(num)]
            request = Request(name, tokens, params, None, block_hasher=self._hasher)
            self.scheduler.add_request(request)

    def end(self) -> None:
        """Abort all requests."""
        from vllm.v1.request import RequestStatus

        running = [each.request_id for each in self.scheduler.running]
        assert not self.scheduler.waiting, "some requests were never scheduled"
        self.scheduler.finish_requests(running, RequestStatus.FINISHED_ABORTED)
        self.step()
        self.settle()

    def close(self) -> None:
        self.scheduler.shutdown()
        if self._half is not None:
            self._half.shutdown()

    def time_functions(self, is_on: bool) -> None:
        for function in self.functions.values():
            function.is_on = is_on

    def step(self) -> Step:
        from vllm.forward_context import set_forward_context

        began = cpu_ns()
        output = self.scheduler.schedule()
        order = pickle.dumps(output, pickle.HIGHEST_PROTOCOL)
        scheduled = cpu_ns() - began
        heard = pickle.loads(order)
        with set_forward_context(None, self._config):
            began = cpu_ns()
            self._rank.pre_forward(heard, None)
            if self._half is not None:
                self._forward()
            self._rank.finish_forward()
            result = self._rank.post_forward(heard.finished_req_ids)
            carried_out = cpu_ns() - began
        requests = self.scheduler.requests
        answer = _answer(
            {
                name: [] if requests[name].is_prefill_chunk else [TOKEN]
                for name in heard.num_scheduled_tokens
            },
            result,
        )
        began = cpu_ns()
        report = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        reported = cpu_ns()
        answer = pickle.loads(report)
        if self._aggregator is not None:
            answer = self._aggregator.aggregate([answer], 0)
        self.scheduler.update_from_output(output, answer)
        ended = cpu_ns()
        if self.functions["rank"].is_on and self._half is not None:
            self._time_message(output.kv_connector_metadata)
        return Step(
            scheduled + ended - reported,
            carried_out + reported - began,
            (len(order), len(report)),
        )

    def _time_message(self, order: Any) -> None:
        """Time the connector's part of the message by itself."""
        began = cpu_ns()
        message = pickle.dumps(order, pickle.HIGHEST_PROTOCOL)
        sent = cpu_ns()
        pickle.loads(message)
        read = cpu_ns()
        self.functions["scheduler"].taken["pickle"] += sent - began - CLOCK_NS
        self.functions["rank"].taken["unpickle"] += read - sent - CLOCK_NS

    def _forward(self) -> None:
        """Call the connector around each attention layer, as ``maybe_transfer_kv_layer`` does."""
        half = self._half
        for name, layer in self._layers.items():
            half.wait_for_layer_load(name)
            half.save_kv_layer(name, layer, None)


def _layer_names() -> list[str]:
    return [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]


def _cache(num_blocks: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=HEAD, dtype=torch.float32)
    names, page = _layer_names(), spec.page_size_bytes
    size = len(names) * page * num_blocks
    tensor = KVCacheTensor(size, names, layer_stride=page * num_blocks, block_stride=page)
    return KVCacheConfig(num_blocks, [tensor], [KVCacheGroupSpec(names, spec)])


def _answer(tokens: dict[str, list[int]], result: Any) -> Any:
    """Return a rank's answer: a token for each request whose prompt is computed."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(tokens)
    places = {name: place for place, name in enumerate(names)}
    return ModelRunnerOutput(names, places, [*tokens.values()], kv_connector_output=result)


def prepare() -> None:
    """Set the environment, and load vLLM's plug-ins as its processes do."""
    os.environ.update(ENVIRONMENT)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
