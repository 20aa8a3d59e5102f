"""vllm-ascend's own model runner, as far as it allocates KV caches and registers them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from tests.engines.vllm.ascend.sources import Sources

RUNNER = "vllm_ascend.worker.model_runner_v1"
NATIVE = "vllm_ascend.distributed.kv_transfer.kv_pool.kv_offload.native.offloading_connector"
BLOCK = 128
"""vllm-ascend's only block size for these models, in tokens."""
ALIGNMENT = 2 << 20
LORA_RANK, ROPE, INDEX = 512, 64, 128
PACKED = 656
"""Bytes of a token's packed main cache, where it is quantised."""
NUM_LAYERS = 2
KINDS = {
    "0.18.0": ("kv", "mla", "dsa", "dsa_c8"),
    "0.23.0": ("kv", "mla", "dsa", "dsa_c8", "sfa_c8"),
    "0.30.0rc2": ("kv", "mla", "dsa", "dsa_c8", "sfa_c8"),
}
"""Attention by release: K and V; MLA; DSA, with a quantised indexer, with quantised MLA, too."""
SPECS = {"0.18.0": "vllm_ascend.patch.platform.patch_kv_cache_interface"}
SPECS_SINCE = "vllm_ascend.core.kv_cache_interface"
BACKENDS = {
    "kv": ("vllm_ascend.attention.attention_v1", "AscendAttentionBackend"),
    "mla": ("vllm_ascend.attention.mla_v1", "AscendMLABackend"),
    **dict.fromkeys(
        ("dsa", "dsa_c8", "sfa_c8"), ("vllm_ascend.attention.sfa_v1", "AscendSFABackend")
    ),
}


class MLAAttention:
    """Layer of an MLA model; only its sizes are looked at."""

    kv_lora_rank, qk_rope_head_dim = LORA_RANK, ROPE


class CacheOnlyAttentionLayer:
    """No layer of these models."""


def _layers(config: Any, kind: type, names: Any = ()) -> dict[str, MLAAttention]:
    return {name: MLAAttention() for name in names or ()}


STAND_INS = {
    "_build_info": SimpleNamespace(__device_type__="A2"),
    "envs_vllm": SimpleNamespace(VLLM_KV_CACHE_LAYOUT=None),
    "MLAAttention": MLAAttention,
    "CacheOnlyAttentionLayer": CacheOnlyAttentionLayer,
    "get_layers_from_vllm_config": _layers,
    "enable_fa_quant": lambda *_: False,
    "is_c8_mxfp_kv_quant": lambda *_: False,
    "requires_contiguous_pa_kv_cache": lambda *_: False,
    "get_layerwise_reuse_config": lambda *_: None,
}
"""A module that their build makes, imports that need an accelerator, settings that stay off."""


class Ascend:
    """KV caches of one release for one of ``KINDS``."""

    def __init__(self, version: str, kind: str, num_blocks: int) -> None:
        self.version, self.kind = version, kind
        self._sources = Sources(version, STAND_INS)
        self.specs: dict[str, Any] = {}
        backends = self._add_layers()
        specs = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=self.specs)
        self.config = SimpleNamespace(
            num_blocks=num_blocks,
            kv_cache_groups=[SimpleNamespace(layer_names=list(self.specs), kv_cache_spec=specs)],
            kv_cache_tensors=[
                SimpleNamespace(
                    size=num_blocks * spec.page_size_bytes,
                    shared_by=[name],
                    layers=[name],
                    layer_stride=0,
                )
                for name, spec in self.specs.items()
            ],
        )
        attention = [
            SimpleNamespace(
                backend=backends[name],
                layer_names=[name],
                kv_cache_spec=spec,
                kv_cache_group_id=0,
            )
            for name, spec in self.specs.items()
        ]
        self._runner = self._sources.part(RUNNER, "NPUModelRunner")()
        self._runner.__dict__.update(
            ascend_config=SimpleNamespace(
                kvpp_config=SimpleNamespace(size=1),
                xlite_graph_config=SimpleNamespace(enabled=False),
            ),
            c8_cache_dtype=torch.int8,
            c8_k_cache_dtype=torch.int8,
            c8_k_scale_cache_dtype=torch.float16,
            device="cpu",
            is_kv_consumer=False,
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(index_head_dim=INDEX, model_type="any")
            ),
            runner_only_attn_layers=set(),
            sparse_kv_offload_enabled=False,
            use_compress=False,
            use_dcp=False,
            use_hybrid_blocks=False,
            use_sparse=kind not in ("kv", "mla"),
            use_sparse_c8_indexer=kind == "dsa_c8",
            vllm_config=SimpleNamespace(kv_transfer_config=object()),
            _kv_cache_spec_attn_group_iterator=lambda: attention,
        )

    def _add_layers(self) -> dict[str, Any]:
        """Add the specs of all layers. Return their backends, by layer."""
        module, backend = BACKENDS[self.kind]
        made = self._sources.part(module, backend)()
        made.is_sparse = lambda: self.kind not in ("kv", "mla")
        for number in range(NUM_LAYERS):
            layer = f"model.layers.{number}.self_attn"
            self.specs[f"{layer}.attn"] = self._spec()
            if self._has_indexer_layers:
                self.specs[f"{layer}.indexer.k_cache"] = self._indexer_spec()
        return dict.fromkeys(self.specs, made)

    @property
    def _has_indexer_layers(self) -> bool:
        """Whether what DSA adds to MLA is a layer of its own."""
        return self.version == "0.30.0rc2" and self.kind not in ("kv", "mla")

    def _spec(self) -> Any:
        if self.kind == "kv":
            return FullAttentionSpec(
                block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
            )
        head_size = LORA_RANK + ROPE
        more: dict[str, Any] = {}
        if self._has_indexer_layers and self.kind == "sfa_c8":
            more = {"cache_sparse_sfa_c8": True}
            return self._made("AscendMLAAttentionSpec", PACKED, torch.int8, **more)
        if self._has_indexer_layers:
            pass
        elif self.kind != "mla":
            head_size += INDEX
            more = {"sparse_head_dim": (LORA_RANK, ROPE, INDEX)}
            if self.kind == "sfa_c8":
                more = {"sparse_head_dim": (PACKED, 0, INDEX), "cache_sparse_sfa_c8": True}
            if self.kind != "dsa":
                of_indexer = "cache_sparse_c8" if self.version == "0.18.0" else "cache_sparse_li_c8"
                more[of_indexer] = True
        return self._made("AscendMLAAttentionSpec", head_size, torch.bfloat16, **more)

    def _indexer_spec(self) -> Any:
        if self.kind == "dsa":
            return self._made("AscendSFAIndexerCacheSpec", INDEX, torch.bfloat16)
        scale = {"scale_dim": 1, "scale_dtype": torch.float16, "cache_sparse_li_c8": True}
        return self._made("AscendSFAIndexerCacheSpec", INDEX, torch.int8, **scale)

    def _made(self, name: str, head_size: int, dtype: torch.dtype, **more: Any) -> Any:
        kind = self._sources.module(SPECS.get(self.version, SPECS_SINCE))[name]
        return kind(block_size=BLOCK, num_kv_heads=1, head_size=head_size, dtype=dtype, **more)

    def caches(self) -> dict[str, Any]:
        """Return what the runner registers with a connector."""
        raw = self._runner._allocate_kv_cache_tensors(self.config)
        found: dict[str, Any] = self._runner._reshape_kv_cache_tensors(self.config, raw)
        return found

    def split_by_theirs(self, parts: Any, page_bytes: int) -> Sequence[tuple[torch.Tensor, int]]:
        """Return the views, and their bytes per page, that vllm-ascend's own connector copies."""
        split = self._sources.module(NATIVE)["_canonicalize_split_cache"]
        found: Sequence[tuple[torch.Tensor, int]] = split(parts, self.config.num_blocks, page_bytes)
        return found
