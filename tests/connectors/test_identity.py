"""Facts that separate the blocks of one vLLM from those of another."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.common.names import block_key
from kvtier.connectors.vllm.identity import namespace


def _config(model: str = "org/model") -> Any:
    """As vLLM's OffloadingConfig, without vLLM."""
    group = SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("l.0", "l.1"))
    return SimpleNamespace(
        groups=(group, SimpleNamespace(group_id=1, tokens_per_block=32, layer_names=("l.2",))),
        worker_kv_bytes_per_block=4096,
        model=SimpleNamespace(name=model, dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2),
        parallel=SimpleNamespace(
            rank=0,
            world_size=2,
            tp_size=2,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
        ),
        engine_id="engine 1",
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout="LBHNC",
    )


def _digest(
    config: Any,
    row_bytes: int = 16384,
    engine: str = "vllm 0.32",
    weights: str = "digest",
    **more: str,
) -> bytes:
    return namespace(config, row_bytes, engine, weights, **more).digest


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.dtype", "fp8"),
        ("cache.tokens_per_hash", 32),
        ("cache.blocks_per_chunk", 4),
        ("worker_kv_bytes_per_block", 8192),
        ("parallel.world_size", 4),
        ("parallel.tp_size", 1),
        ("parallel.pp_size", 2),
        ("parallel.pcp_size", 2),
        ("parallel.dcp_size", 2),
        ("replicated_layout", True),
        ("canonical_layout", True),
        ("kv_cache_layout", "NHD"),
        ("groups", ()),
    ],
)
def test_whatever_changes_the_bytes_of_a_block_changes_its_key(path: str, value: object) -> None:
    changed = deepcopy(_config())
    *where, name = path.split(".")
    part = changed
    for each in where:
        part = getattr(part, each)
    assert getattr(part, name) != value
    setattr(part, name, value)
    assert _digest(changed) != _digest(_config())


def test_rows_engines_weights_traits_and_salts_are_separate_too() -> None:
    digests = {
        _digest(_config()),
        _digest(_config(), row_bytes=32768),
        _digest(_config(), engine="vllm 0.33"),
        _digest(_config(), weights="others"),
        _digest(_config(), traits="quantized"),
        _digest(_config(), salt="tenant"),
    }
    assert len(digests) == 6


def test_names_of_layers_and_their_groups_count() -> None:
    renamed, regrouped = _config(), _config()
    renamed.groups[1].layer_names = ("l.9",)
    regrouped.groups[0].layer_names, regrouped.groups[1].layer_names = ("l.0",), ("l.1", "l.2")
    assert len({_digest(each) for each in (_config(), renamed, regrouped)}) == 3


def test_who_asks_and_where_does_not_count() -> None:
    other = _config()
    other.model.name = "the same weights in another place"
    other.engine_id, other.parallel.rank, other.parallel.data_parallel_index = "engine 2", 1, 1
    assert _digest(other) == _digest(_config())


def test_key_of_a_block_depends_on_both_parts() -> None:
    digest, other = _digest(_config()), _digest(_config(), salt="x")
    keys = {block_key(d, k) for d in (digest, other) for k in (b"a" * 36, b"a" * 35 + b"b")}
    assert len(keys) == 4
    assert {len(each) for each in keys} == {32}
