"""Facts that separate the blocks of one vLLM from those of another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtier.connectors.common.names import block_key
from kvtier.connectors.vllm.shared.names import EngineFacts, GroupFacts, namespace, rank_layout

FACTS = EngineFacts(
    groups=(GroupFacts(0, 16, ("l.0", "l.1")), GroupFacts(1, 32, ("l.2",))),
    bytes_per_page=4096,
    pages_per_block=2,
    tokens_per_hash=16,
    dtype="bfloat16",
    engine_id="engine 1",
    num_ranks=2,
    tp_size=2,
    kv_cache_layout="LBHNC",
)


def _digest(
    facts: EngineFacts = FACTS,
    row_bytes: int = 16384,
    engine: str = "vllm 0.32",
    weights: str = "digest",
    **more: str,
) -> bytes:
    return namespace(facts, row_bytes, engine, weights, **more).digest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "fp8"),
        ("tokens_per_hash", 32),
        ("pages_per_block", 4),
        ("bytes_per_page", 8192),
        ("num_ranks", 4),
        ("tp_size", 1),
        ("pp_size", 2),
        ("pcp_size", 2),
        ("dcp_size", 2),
        ("is_replicated", True),
        ("is_canonical", True),
        ("kv_cache_layout", "NHD"),
        ("groups", ()),
    ],
)
def test_whatever_changes_the_bytes_of_a_block_changes_its_key(name: str, value: Any) -> None:
    assert getattr(FACTS, name) != value
    assert _digest(replace(FACTS, **{name: value})) != _digest()


def test_keys_of_one_parallel_size_are_those_of_ever() -> None:
    """Blocks in existing slabs and stores are found: the digest's inputs keep names and order."""
    told = "3b49c58ec765677c84558e36dd35c53c753c34568fd40494e87297bda7b7a81b"
    assert _digest().hex() == told


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytes_per_page", 8192),
        ("num_ranks", 4),
        ("tp_size", 1),
        ("pp_size", 2),
        ("is_replicated", True),
        ("rank", 1),
    ],
)
def test_keys_of_any_size_say_nothing_of_ranks_and_folders_do(name: str, value: Any) -> None:
    any_size = replace(FACTS, any_size=True)
    other = replace(any_size, **{name: value})
    assert _digest(other) == _digest(any_size) != _digest()
    if name != "rank":
        assert rank_layout(other, 16384) != rank_layout(any_size, 16384)


@pytest.mark.parametrize(
    ("name", "value"),
    [("pages_per_block", 4), ("kv_cache_layout", "NHD"), ("dtype", "fp8"), ("groups", ())],
)
def test_keys_of_any_size_say_the_model_and_the_page(name: str, value: Any) -> None:
    any_size = replace(FACTS, any_size=True)
    assert _digest(replace(any_size, **{name: value})) != _digest(any_size)


def test_rows_engines_weights_traits_and_salts_are_separate_too() -> None:
    digests = {
        _digest(),
        _digest(row_bytes=32768),
        _digest(engine="vllm 0.33"),
        _digest(weights="others"),
        _digest(traits="quantized"),
        _digest(salt="tenant"),
    }
    assert len(digests) == 6


def test_names_of_layers_and_their_groups_count() -> None:
    first, second = FACTS.groups
    renamed = replace(FACTS, groups=(first, replace(second, layer_names=("l.9",))))
    regrouped = replace(
        FACTS,
        groups=(
            replace(first, layer_names=("l.0",)),
            replace(second, layer_names=("l.1", "l.2")),
        ),
    )
    assert len({_digest(each) for each in (FACTS, renamed, regrouped)}) == 3


def test_who_asks_and_where_does_not_count() -> None:
    assert _digest(replace(FACTS, engine_id="engine 2", rank=1, replica=1)) == _digest()


def test_key_of_a_block_depends_on_both_parts() -> None:
    digest, other = _digest(), _digest(salt="x")
    keys = {block_key(d, k) for d in (digest, other) for k in (b"a" * 36, b"a" * 35 + b"b")}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}
