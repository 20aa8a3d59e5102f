"""Arithmetic of the benchmark of steps under vLLM; its steps need vLLM."""

from __future__ import annotations

from benchmarks.vllm.step import ALONE, HOST, NOTHING, VLLM, Samples, above, rows_of, table, targets
from benchmarks.vllm.steps import Functions, Step

ROUNDS = 8


def _samples(scheduler_us: int, rank_us: int, missing: int | None = None) -> Samples:
    """Three steps in each round, each round slower by 10 us."""
    return Samples(
        {
            (number, step): Step(1000 * (scheduler_us + 10 * number), 1000 * rank_us, (100, 50))
            for number in range(ROUNDS)
            for step in range(3)
            if step != missing
        }
    )


def test_cost_is_that_above_the_same_step_without_a_connector() -> None:
    alone, ours = _samples(100, 5), _samples(130, 30, missing=1)
    assert above(ours, alone, "scheduler").value == 30
    assert above(ours, alone, "rank").value == 25


def test_target_is_met_by_process_and_contestant() -> None:
    contestants = {ALONE: _samples(100, 5), NOTHING: _samples(124, 15), VLLM: _samples(900, 5)}
    found = {64: contestants | {HOST: _samples(130, 30)}}
    judged = [(target["contestant"], target["process"], target["met"]) for target in targets(found)]
    assert judged == [(HOST, "scheduler", True), (HOST, "rank", False)]


def test_rows_have_the_functions_most_expensive_first() -> None:
    ours = _samples(130, 30)
    for ns in (2000, 4000, 3000):
        ours.add_functions("rank", {"bind_connector_metadata": 500, "start_load_kv": ns})
    rows = rows_of({ALONE: _samples(100, 5), HOST: ours}, 64)
    assert list(rows[1]["rank_by_function_us"].items()) == [
        ("start_load_kv", 3),
        ("bind_connector_metadata", 0.5),
    ]
    assert rows[1]["rank_functions_us"] == 3.5
    assert table(rows).row_count == 2


def test_own_part_is_that_above_a_connector_that_does_nothing() -> None:
    found = {ALONE: _samples(100, 5), NOTHING: _samples(124, 15), HOST: _samples(130, 30)}
    _, nothing, ours = rows_of(found, 64)
    assert (ours["scheduler_own_us"], ours["rank_own_us"]) == (6, 15)
    assert "rank_own_us" not in nothing


def test_functions_are_timed_only_when_that_is_on() -> None:
    class Connector:
        def take_events(self) -> list[int]:
            return [1, 2]

    connector, functions = Connector(), Functions(("take_events", "absent"))
    functions.wrap(connector)
    assert list(connector.take_events()) == [1, 2]
    assert functions.take() == {}
    functions.is_on = True
    assert list(connector.take_events()) == [1, 2]
    assert list(functions.take()) == ["take_events"]
    assert functions.take() == {}
