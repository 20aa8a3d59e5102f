"""Counts of the benchmark of the way to the first hit; its servers need vLLM."""

from __future__ import annotations

import pytest

from benchmarks.vllm.first_hit import KVTIER, WAYS, Way, table


def test_what_is_written_beside_the_plain_command_is_counted() -> None:
    way = Way("x", ["""A=1 B=2 vllm serve MODEL --c --d '{"e": "f", "g": [{"h": 1}]}'"""])
    assert way.counts() == {
        "commands": 1,
        "processes_beside_vllm": 0,
        "variables_and_options": 4,
        "json_fields": 2,
        "characters": len("""A=1 B=2  --c --d '{"e": "f", "g": [{"h": 1}]}'"""),
    }
    two = Way("x", ["server --size 1", "vllm serve MODEL"]).counts()
    assert (two["commands"], two["processes_beside_vllm"], two["variables_and_options"]) == (
        2,
        1,
        1,
    )


@pytest.mark.parametrize("is_durable", [False, True])
def test_kvtier_needs_one_command_and_no_json(is_durable: bool) -> None:
    (way,) = (way for way in WAYS if way.name == KVTIER and way.is_durable == is_durable)
    assert (way.counts()["commands"], way.counts()["json_fields"]) == (1, 0)
    assert way.counts()["variables_and_options"] == 1 + is_durable


def test_the_table_has_a_row_for_every_way() -> None:
    rows = [
        {"way": way.name, "is_durable": way.is_durable, **way.counts()}
        | {"ready_s": 1.0, "first_hit_s": 2.0}
        for way in WAYS
    ]
    assert table(rows).row_count == len(WAYS) == 6
