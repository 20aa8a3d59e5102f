"""Requests of a vLLM step that may have something to store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.vllm.shared.step import DueRequests, prefill_pieces


def _output(
    running: dict[str, int],
    pages: dict[str, list[int]] | None = None,
    new: dict[str, int] | None = None,
    guesses: dict[str, list[int]] | None = None,
    **more: Any,
) -> Any:
    """Return a step. running, new: tokens by request. pages: that requests were given."""
    num_tokens = {**(new or {}), **running}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=0) for name in new or ()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(running),
            resumed_req_ids=more.pop("resumed", set()),
            new_block_ids=[(pages[each],) if each in (pages or {}) else None for each in running],
            num_computed_tokens=[100] * len(running),
        ),
        num_scheduled_tokens=num_tokens,
        total_num_scheduled_tokens=sum(num_tokens.values()),
        scheduled_spec_decode_tokens=guesses or {},
        **{"finished_req_ids": set(), "preempted_req_ids": None, **more},
    )


THREE = {"a": 1, "b": 1, "c": 1}


def _names(output: Any) -> list[str]:
    """Return the requests of a reduced step, which are the same everywhere in it."""
    cached = output.scheduled_cached_reqs
    assert len(cached.req_ids) == len(cached.new_block_ids)
    named = {*cached.req_ids, *(each.req_id for each in output.scheduled_new_reqs)}
    assert named == output.num_scheduled_tokens.keys()
    return list(output.num_scheduled_tokens)


def test_step_in_which_requests_only_generate_has_nothing() -> None:
    assert DueRequests().reduce(_output(THREE), is_due=False) is None


def test_request_that_was_given_a_page_is_due() -> None:
    output = _output(THREE, pages={"b": [7]})
    reduced = DueRequests().reduce(output, is_due=False)
    assert _names(reduced) == ["b"]
    assert reduced.scheduled_cached_reqs.new_block_ids == [([7],)]
    assert _names(output) == ["a", "b", "c"], "the scheduler's own output stays as it is"


def test_prompts_that_are_computed_are_due() -> None:
    output = _output({"a": 1, "b": 64}, new={"n": 1})
    assert _names(DueRequests().reduce(output, is_due=False)) == ["n", "b"]
    assert prefill_pieces(output) == [(100, 64)]


def test_guessed_tokens_are_no_prompt() -> None:
    output = _output({"a": 4, "b": 3}, guesses={"a": [1, 2, 3], "b": [1, 2]})
    assert DueRequests(3).reduce(output, is_due=False) is None
    assert prefill_pieces(output) == []
    output = _output({"a": 4, "b": 3}, guesses={"a": [1, 2, 3]})
    assert _names(DueRequests(3).reduce(output, is_due=False)) == ["b"]


def test_page_that_is_given_early_makes_its_request_due_again_when_the_one_before_is_full() -> None:
    due = DueRequests(2)
    found = [
        due.reduce(_output(THREE, pages={"b": [7]} if step == 0 else None), is_due=False)
        for step in range(4)
    ]
    assert [each and _names(each) for each in found] == [["b"], None, ["b"], None]


@pytest.mark.parametrize(
    "more",
    [
        {"finished_req_ids": {"z"}},
        {"preempted_req_ids": {"z"}},
        {"kv_cache_block_copies": [object()]},
        {"kv_connector_block_state": SimpleNamespace(boundary_state_offloads={"a": [(0, 1, 16)]})},
    ],
)
def test_what_else_moved_is_told_without_requests_that_run(more: dict[str, Any]) -> None:
    reduced = DueRequests().reduce(_output(THREE, **more), is_due=False)
    assert _names(reduced) == []
    for name, value in more.items():
        assert getattr(reduced, name) == value


def test_resumed_request_and_pages_of_one_that_waits_are_told() -> None:
    output = _output(THREE, resumed={"c"})
    assert _names(DueRequests().reduce(output, is_due=False)) == ["c"]
    assert _names(DueRequests().reduce(_output(THREE), is_due=True)) == []


def test_step_whose_requests_are_all_due_is_not_copied() -> None:
    output = _output({"a": 1}, pages={"a": [3]})
    assert DueRequests().reduce(output, is_due=False) is output
