"""SGLang's own tree over small device pools on the CPU, with the linker below it."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_server_args
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture

from kvtier.connectors.sglang.entry import KvtierLinker
from kvtier.connectors.sglang.plugin import register, wrapping_hooks
from kvtier.connectors.sglang.shared.hooks import missing
from tests.kit.waiting import wait_until

PAGE = 16
MIB = 1 << 20
FULL = CacheConfig(page_size=PAGE, num_layers=3, kv_size=1024, max_context_len=1024)
WINDOW = 2 * PAGE
SLIDING = CacheConfig(
    page_size=PAGE,
    components=(ComponentType.FULL, ComponentType.SWA),
    num_layers=5,
    full_attention_layer_ids=(1, 4),
    sliding_window_size=WINDOW,
    kv_size=1024,
    max_context_len=1024,
)
MAMBA = CacheConfig(
    page_size=PAGE,
    components=(ComponentType.FULL, ComponentType.MAMBA),
    num_layers=3,
    full_attention_layer_ids=(1,),
    enable_mamba_extra_buffer=True,
    kv_size=512,
)


class Request(SimpleNamespace):
    """The part of SGLang's request that its tree reads."""


def hook() -> None:
    """Install kvtier's hooks, as in a process of SGLang's."""
    if missing(wrapping_hooks()):
        register()
        HookRegistry.apply_hooks()


class Tree:
    """SGLang's tree with the linker.

    folder: folder of the disk; None for host memory only. core: name of SGLang's tree core. events:
    format of its events; "" for none.
    """

    def __init__(
        self,
        config: CacheConfig,
        folder: Path | None = None,
        core: str = "python",
        events: str = "",
        **extra: Any,
    ) -> None:
        made: Any = build_fixture(
            config,
            tree_core_backend="python",
            enable_kv_cache_events=bool(events),
            dynamo_kv_event_format=events == "dynamo",
        )
        self.cache, self.allocator, self.requests = made
        if core != "python":  # the fixture wants one that can be looked into
            params = self.cache.cache_init_params
            with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(core):
                self.cache = UnifiedRadixCache(params=params)
            self.cache.cache_init_params = params
        settings: dict[str, Any] = {
            "host_capacity": 8 * MIB,
            "namespace": "weights of the tests",
            "load_policy": "always",
        }
        if folder is not None:
            settings |= {"disk_path": str(folder), "disk_capacity": 16 * MIB}
        linker: Any = KvtierLinker  # resolved lazily
        options = copy(get_server_args())
        options.kv_events_config = json.dumps({"format": events}) if events else None
        self.linker = linker(
            options,
            self.cache.cache_init_params,
            components=set(self.cache.components),
            extra_config=settings | extra,
        )
        self.cache.init_cache_linker(self.linker)
        self._align()
        self.pool = self.allocator.get_kvcache()
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)

    def _align(self) -> None:
        """Skip to a page: the fixture's allocator of tokens begins at a page's second token."""
        if type(self.allocator) is TokenToKVPoolAllocator:
            self.allocator.alloc(PAGE - 1)

    def tensors(self) -> list[tuple[torch.Tensor, bool]]:
        """Return all buffers of the device, and whether a window's indices address each."""
        full = getattr(self.pool, "full_kv_pool", self.pool)
        window = getattr(self.pool, "swa_kv_pool", None)
        found = [(each, False) for each in (*full.k_buffer, *full.v_buffer)]
        if window is not None:
            found += [(each, True) for each in (*window.k_buffer, *window.v_buffer)]
        return found

    def fill(self, seed: int) -> None:
        """Fill the whole device with random bytes."""
        torch.manual_seed(seed)
        for each, _ in self.tensors():
            each.view(torch.uint8).copy_(torch.randint(0, 256, each.view(torch.uint8).shape))

    def compute(self, prompt: Sequence[int], salt: str | None = None) -> list[torch.Tensor]:
        """Insert a computed prompt into the tree; return its bytes on the device."""
        slots = self._allocate(len(prompt))
        kept = self.content(slots)
        key = RadixKey(array("q", prompt), cache_salt=salt)
        self.cache.insert(InsertParams(key=key, value=slots))
        return kept

    def _allocate(self, num_tokens: int) -> torch.Tensor:
        if not hasattr(self.allocator, "swa_attn_allocator"):
            return self.allocator.alloc(num_tokens)
        slots = self.allocator.full_attn_allocator.alloc(num_tokens)
        window = self.allocator.swa_attn_allocator.alloc(num_tokens)
        self.allocator.set_full_to_swa_mapping(slots, window)
        return slots

    def content(self, slots: torch.Tensor, window: int | None = None) -> list[torch.Tensor]:
        """Return a copy of the device's bytes in slots.

        window: number of last slots to copy from buffers that keep a window.
        """
        found = []
        for each, is_window in self.tensors():
            at = slots
            if is_window:
                at = self.pool.full_to_swa_index_mapping[slots]
                at = at[-window:] if window else at
            found.append(each[at].clone().view(torch.uint8))
        return found

    def settle(self) -> None:
        """Wait until all offloads are reported, and no transfer is in flight below."""

        def is_done() -> bool:
            self.cache.check_hicache_events()
            return not self.cache.linker.pending_offloads

        wait_until(is_done, "all offloads are reported")
        for each in self.linker._linked.values():
            assert each.cache.ladder.drain(20, each.cache.poll)

    def flush(self) -> None:
        """Nothing is on the device any more."""
        self.cache.reset()
        self.allocator.clear()
        self._align()
        self.fill(1)

    def find(self, rid: str, prompt: Sequence[int]) -> tuple[Any, int]:
        """Return a request, and the number of its prompt's tokens that the linker has."""
        req = Request(rid=rid, kv=None, swa_branching_seqlen=None, session=None)
        key = RadixKey(array("q", prompt))
        result = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        req.last_node = result.last_device_node
        return req, result.host_hit_length

    def load(self, req: Any) -> torch.Tensor | None:
        """Return the locations of its tokens on the device; None if they did not arrive."""
        num, _ = self.cache.linker.load_back(req)
        slots = self.cache.linker.private_load_indices.get(req.rid)
        index = self.cache.ready_to_load_host_cache()
        self.linker.layer_done_counter.set_consumer(index)
        for layer in range(self.pool.layer_num):
            self.linker.layer_done_counter.wait_until(layer)
        assert num == (0 if slots is None else len(slots))
        return None if self.cache.linker.finish_loads() else slots

    def close(self) -> None:
        self.linker.reset()
        for each in self.linker._linked.values():
            each.cache.ladder.check_invariants(0)
        self.cache.linker.close()


def wait_for(tree: Tree, rid: str, prompt: Sequence[int], num_tokens: int) -> Any:
    """Look up until the linker has so many tokens of a prompt in host memory."""
    found: list[Any] = []

    def is_found() -> bool:
        req, num = tree.find(rid, prompt)
        found.append(req)
        tree.cache.check_hicache_events()
        return num == num_tokens

    wait_until(is_found, f"{num_tokens} tokens are found")
    return found[-1]
