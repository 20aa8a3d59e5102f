"""Copies between SGLang's device and host pools on a CPU, which SGLang itself lacks.

SGLang's copies to its host cache are kernels of accelerators. If its device is the CPU, both pools
are plain memory, and a copy is an indexed assignment per layer.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

LOSS = "SGLang can't copy between its device and host pools on a CPU"
"""Consequence, for the log, if the hooks could not be installed."""

POOLS = {
    "mha.MHATokenToKVPoolHost": (
        ("k_buffer", "device_k_buffers"),
        ("v_buffer", "device_v_buffers"),
    ),
    "mla.MLATokenToKVPoolHost": (("kv_buffer", "device_kv_buffers"),),
}
"""Host pools by class: names of the host buffers, and of the device buffers (a list of layers) that
they mirror. Before SGLang 0.5.23 only the device pool has these, under the names of the host's."""


@cache
def hooks() -> dict[str, Any]:
    """Return replacements of SGLang functions, by full name."""
    found: dict[str, Any] = {}
    for pool, buffers in POOLS.items():
        name = class_name(pool)
        found[f"{name}.backup_from_device_all_layer"] = _backup(buffers)
        found[f"{name}.load_to_device_per_layer"] = _load(buffers)
    # There is no driver to register the memory with.
    found["sglang.srt.mem_cache.pool_host.common._cuda_host_register"] = lambda *_, **__: None
    return found


def class_name(pool: str) -> str:
    """Return the full name of a class of host pools."""
    if find_spec("sglang.srt.mem_cache.pool_host.mha"):
        return f"sglang.srt.mem_cache.pool_host.{pool}"
    return f"sglang.srt.mem_cache.memory_pool_host.{pool.partition('.')[2]}"  # 0.5.14


def _layers(pool: Any, device_pool: Any, host: str, device: str) -> Any:
    """Return the device's buffers, a list of layers."""
    return getattr(pool, device) if hasattr(pool, device) else getattr(device_pool, host)


def _backup(buffers: tuple[tuple[str, str], ...]) -> Any:
    def backup_from_device_all_layer(
        self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str
    ) -> None:
        del io_backend
        for host, device in buffers:
            for layer, source in enumerate(_layers(self, device_pool, host, device)):
                view, at = _layer(getattr(self, host), self, layer, host_indices)
                view[at] = source[device_indices]

    return backup_from_device_all_layer


def _load(buffers: tuple[tuple[str, str], ...]) -> Any:
    def load_to_device_per_layer(
        self: Any,
        device_pool: Any,
        host_indices: Any,
        device_indices: Any,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        del io_backend, is_draft
        for host, device in buffers:
            view, at = _layer(getattr(self, host), self, layer_id, host_indices)
            _layers(self, device_pool, host, device)[layer_id][device_indices] = view[at]

    return load_to_device_per_layer


def _layer(
    buffer: torch.Tensor, pool: Any, layer: int, tokens: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """Return a view of one layer, and the tokens' index in it: [tokens] or [pages, page_size]."""
    match pool.layout:
        case "layer_first":
            return buffer[layer], tokens
        case "page_first":
            return buffer[:, layer], tokens
        case "page_first_direct":
            view = buffer[:, layer]
        case "page_head":  # heads before tokens
            view = buffer[..., layer, :].transpose(1, 2)
        case layout:
            raise NotImplementedError(
                f"--hicache-mem-layout {layout} on a CPU; use page_first, page_first_direct, "
                "page_head or layer_first"
            )
    return view, (tokens // pool.page_size, tokens % pool.page_size)
