"""vLLM's own server, with or without a cache under it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines.model import GPT_OSS, QWEN3, QWEN3_NEXT
from benchmarks.engines.protocol import read_counters
from benchmarks.engines.servers import (
    LOOPBACK,
    SERVED_AS,
    Contestant,
    Size,
    Tokens,
    compute_cores,
    free_port,
    words_of,
)
from kvtier.connectors.vllm.shared.fronts import OFFLOADING, Front

VLLM, OURS, LMCACHE = "vLLM", "vLLM + kvtier", "vLLM + LMCache"
ENDLESS, ON_DISK = "vLLM, endless pool", "vLLM + kvtier, mostly on disk"
OWN_FRONT = "vLLM + KvtierConnector"
AUDITED = "vLLM + kvtier, 0.001 of hits audited"
BLOCK = 128
"""vLLM's block size on the CPU, in tokens."""
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
FROM_TIER = "vllm:external_prefix_cache_hits_total"

SHAPES: dict[str, dict[str, object]] = {
    QWEN3: {"--dtype": "float32"},
    # vLLM's kernels for the CPU take these layers in bfloat16, and give no state from the middle of
    # a step: a step is as long as a block.
    QWEN3_NEXT: {
        "--dtype": "bfloat16",
        "--mamba-ssm-cache-dtype": "float32",
        "--max-num-batched-tokens": BLOCK,
    },
    # For models of this type vLLM's chats need a tokenizer that it downloads.
    GPT_OSS: {"--dtype": "float32", "--hf-overrides": json.dumps({"model_type": "gpt_oss_text"})},
}
"""Options of vLLM by the shape of its model."""

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "THP_MEM_ALLOC_ENABLE": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Variables: no telemetry, small pools, hashes that are equal in every process, and weights in huge
pages. With small pages two servers of a kind differ by the pages that they got."""


@dataclass(frozen=True, slots=True)
class Vllm(Contestant):
    """vLLM with or without a connector."""

    environment: str = "vllm"
    device_blocks: int | None = None
    """Blocks of its pool, if not those of the server's ``Size``."""
    connector: dict[str, object] | None = None
    """Its ``--kv-transfer-config``."""
    block_tokens: int = BLOCK
    """Tokens of a block."""
    shape: str = QWEN3
    """Shape of its model."""

    block = BLOCK
    reset_path = "/reset_prefix_cache"

    @property
    def has_tier(self) -> bool:
        return self.connector is not None

    @property
    def packages(self) -> list[str]:
        below = {
            OURS: ["kvtier"],
            ON_DISK: ["kvtier"],
            AUDITED: ["kvtier"],
            OWN_FRONT: ["kvtier"],
            LMCACHE: ["lmcache"],
        }
        return ["vllm-cpu", *below.get(self.name, [])]

    def command(self, model: Path, port: int, folder: Path, size: Size) -> list[str]:
        arguments: dict[str, object] = {
            "--model": model,
            "--served-model-name": SERVED_AS,
            "--host": LOOPBACK,
            "--port": port,
            "--block-size": self.block_tokens,
            "--num-gpu-blocks-override": self.device_blocks or size.device_blocks,
            "--max-model-len": size.max_tokens,
            "--max-num-seqs": 16,
            "--generation-config": "vllm",
            "--override-generation-config": json.dumps({"temperature": 0.0}),
            "--disable-uvicorn-access-log": None,
            "--enforce-eager": None,
            "--enable-prefix-caching": None,
            "--enable-prompt-tokens-details": None,
            **SHAPES[self.shape],
        }
        if self.connector is not None:
            arguments["--kv-transfer-config"] = json.dumps(self.connector)
        return ["-m", "vllm.entrypoints.openai.api_server", *words_of(arguments)]

    def environ(self) -> dict[str, str]:
        """Return the variables, with the cores that it computes on.

        By default vLLM leaves one more core free with a connector, and on two cores it then takes
        both. Contestants would not compute with equally many threads.
        """
        return {**QUIET, "VLLM_CPU_OMP_THREADS_BIND": compute_cores(), **self.variables}

    def read_tokens(self, metrics: str) -> Tokens:
        counted = read_counters(metrics)
        from_tier = counted.get(FROM_TIER, 0)
        return Tokens(counted.get(QUERIES, 0), counted.get(HITS, 0) + from_tier, from_tier)


def vllm_alone() -> Vllm:
    return Vllm(VLLM, variables={"VLLM_PLUGINS": ""})


def vllm_endless(num_blocks: int) -> Vllm:
    """Return vLLM alone with a pool that never evicts, which no cache can surpass."""
    return Vllm(ENDLESS, device_blocks=num_blocks, variables={"VLLM_PLUGINS": ""})


def with_kvtier(
    host: str | None, name: str = OURS, front: Front = OFFLOADING, **settings: object
) -> Vllm:
    """Return vLLM with kvtier, as ``kvtier vllm-args`` configures it.

    Args:
        host: capacity of host memory; None over a node.
        name: of the contestant.
        front: kvtier's connector.
        settings: more of ``kv_connector_extra_config``.
    """
    sizes = {} if host is None else {"host_capacity": host}
    return Vllm(
        name,
        connector={
            "kv_connector": front.connector,
            **front.config,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**front.extra, **sizes, **settings},
        },
    )


def with_lmcache(host_gib: float) -> Vllm:
    """Return vLLM with LMCache's server, which vLLM starts.

    LMCache inside of vLLM does not support a CPU.
    """
    size = f"--l1-size-gb {host_gib:g} --eviction-policy LRU --chunk-size {BLOCK}"
    return Vllm(
        LMCACHE,
        environment="vllm-lmcache",
        is_optional=True,
        connector={
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{LOOPBACK}",
                "lmcache.mp.port": free_port(),
                "lmcache.mp.autostart": True,
                "lmcache.mp.autostart.server_args": (
                    f"{size} --supported-transfer-mode auto --disable-observability"
                ),
            },
        },
        variables={"VLLM_PLUGINS": ""},
    )
