"""SGLang's own server on the CPU, with or without a cache under it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines.protocol import read_by_label
from benchmarks.engines.servers import (
    LOOPBACK,
    SERVED_AS,
    Contestant,
    Size,
    Tokens,
    compute_cores,
    words_of,
)
from benchmarks.peers import ROOT
from kvtier.observe import specs

SGLANG, HICACHE, FILE = "SGLang", "SGLang + HiCache", "SGLang + HiCache + file"
OURS, LINKER = "SGLang + HiCache + kvtier", "SGLang + kvtier's linker"
BLOCK = 64
"""SGLang's page size here, in tokens."""
STAND_INS = ROOT / "tests" / "sglang" / "stand_ins"
"""Stand-ins for packages that SGLang imports and PyPI does not have for a CPU."""
PLUGINS = ROOT / "benchmarks" / "stand_ins"
"""Plug-ins for SGLang: a slow disk under kvtier, and pageable memory for `file`."""
PROMPTS, CACHED = specs.SGLANG_PROMPT_TOKENS.name, specs.SGLANG_CACHED_TOKENS.name
NO_PLUGIN = "none"

Below = Callable[[Path], dict[str, object]]
"""Return the server's options; the folder belongs to this server alone."""


@dataclass(frozen=True, slots=True)
class Sglang(Contestant):
    """SGLang and what is under it."""

    environment: str = "sglang-server"
    below: Below | None = None
    """Return the options of the cache under SGLang."""
    plugins: str = NO_PLUGIN
    """Plug-ins that SGLang may load."""
    keeps: bool = False
    """Whether it has storage."""

    block = BLOCK
    reset_path = "/flush_cache?timeout=30"

    @property
    def has_tier(self) -> bool:
        return self.keeps

    @property
    def packages(self) -> list[str]:
        return ["sglang"] if self.plugins == NO_PLUGIN else ["sglang", "kvtier"]

    def command(self, model: Path, port: int, folder: Path, size: Size) -> list[str]:
        arguments: dict[str, object] = {
            "--model-path": model,
            "--served-model-name": SERVED_AS,
            "--host": LOOPBACK,
            "--port": port,
            "--device": "cpu",
            "--dtype": "float32",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--sampling-defaults": "model",
            "--grammar-backend": "none",
            "--page-size": BLOCK,
            "--max-total-tokens": size.device_blocks * BLOCK,
            "--mem-fraction-static": 0.3,
            "--context-length": size.max_tokens,
            "--max-running-requests": 16,
            "--log-level": "warning",
            "--disable-overlap-schedule": None,
            "--disable-cuda-graph": None,
            "--enable-cache-report": None,
            "--enable-metrics": None,
            "--skip-server-warmup": None,
            "--sleep-on-idle": None,
        }
        if self.below is not None:
            arguments |= self.below(folder)
        return ["-m", "sglang.launch_server", *words_of(arguments)]

    def environ(self) -> dict[str, str]:
        """Return the variables, as vLLM's: no telemetry, weights in huge pages."""
        return {
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "PYTHONHASHSEED": "0",
            "THP_MEM_ALLOC_ENABLE": "1",
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": compute_cores(),
            "SGLANG_PLUGINS": self.plugins,
            "PYTHONPATH": os.pathsep.join(map(str, (STAND_INS, PLUGINS))),
            **self.variables,
        }

    def read_tokens(self, metrics: str) -> Tokens:
        prompts = sum(read_by_label(metrics, PROMPTS, "is_streaming").values())
        sources = read_by_label(metrics, CACHED, "cache_source")
        cached = sum(sources.values())
        return Tokens(prompts, cached, cached - sources.get("device", 0))


def sglang_alone() -> Sglang:
    return Sglang(SGLANG)


def with_hicache(ratio: float) -> Sglang:
    """Return SGLang with HiCache, which on a CPU copies by kvtier's plug-in.

    Args:
        ratio: host memory as a multiple of device memory.
    """
    return Sglang(HICACHE, below=lambda folder: hierarchical(ratio), plugins="kvtier")


def with_file(ratio: float) -> Sglang:
    """Return SGLang with HiCache and its `file` storage.

    `file` page-locks every page that it reads, which fails without an accelerator. A plug-in
    prevents that.
    """

    def below(folder: Path) -> dict[str, object]:
        return hierarchical(ratio) | storage("file", {"file_storage_path": str(folder / "pages")})

    return Sglang(FILE, below=below, plugins="kvtier,sglang_pageable", keeps=True)


def with_kvtier(ratio: float, capacity: str, **settings: object) -> Sglang:
    """Return SGLang with HiCache and kvtier's storage, as ``kvtier sglang-args`` configures it.

    Args:
        ratio: host memory as a multiple of device memory.
        capacity: of the disk.
        settings: further settings of kvtier.
    """

    def below(folder: Path) -> dict[str, object]:
        extra = {
            "backend_name": "kvtier",
            "module_path": "kvtier.connectors.sglang.entry",
            "class_name": "KvtierStorage",
            "interface_v1": 1,
            "hicache_storage_pass_prefix_keys": True,
            "disk_path": str(folder / "slab"),
            "disk_capacity": capacity,
            **settings,
        }
        return hierarchical(ratio) | storage("dynamic", extra)

    return Sglang(OURS, below=below, plugins="kvtier", keeps=True)


def with_linker(host_bytes: int, capacity: str, **settings: object) -> Sglang:
    """Return SGLang with kvtier in place of its host memory."""

    def below(folder: Path) -> dict[str, object]:
        config = {
            "linker": "KvtierLinker",
            "linker_module_path": "kvtier.connectors.sglang.entry",
            "linker_extra_config": {
                "host_capacity": host_bytes,
                "disk_path": str(folder / "slab"),
                "disk_capacity": capacity,
                **settings,
            },
        }
        name = "--unified-cache-external-linker"
        return {
            "--enable-unified-cache-external-linker": None,
            f"{name}-backend": "dynamic",
            f"{name}-config": json.dumps(config),
        }

    return Sglang(LINKER, below=below, plugins="kvtier", keeps=True)


def hierarchical(ratio: float) -> dict[str, object]:
    return {"--enable-hierarchical-cache": None, "--hicache-ratio": ratio}


def storage(backend: str, extra: dict[str, object]) -> dict[str, object]:
    name = "--hicache-storage-backend"
    return {name: backend, f"{name}-extra-config": json.dumps(extra)}


def slowed(contestant: Sglang, bytes_per_s: int) -> Sglang:
    """Return the same contestant over a disk of ``bytes_per_s`` in each direction."""
    return Sglang(
        contestant.name,
        below=contestant.below,
        plugins=f"{contestant.plugins},kvtier_slow_disk",
        keeps=True,
        variables={"KVTIER_BENCH_BYTES_PER_S": str(bytes_per_s)},
    )
