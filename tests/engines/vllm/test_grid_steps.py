"""Steps of ``GridScheduler``, derived from vLLM's real schedulers, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.vllm.steps import PAGE, Replica, prepare
from kvtier.connectors.vllm.shared.grid import SCHEDULER
from kvtier.core.errors import ConfigError
from tests.engines.vllm.engines import Connects, multi, own_connector
from tests.engines.vllm.replica import replica

CELL = 4 * PAGE
NUM_RUNNING = 4
OPTIONS = {"scheduler_cls": SCHEDULER, "max_num_batched_tokens": CELL + NUM_RUNNING + 7}
"""A step has room for one cell beside the other requests, and for no second one."""


def replica_of(
    connects: Connects = own_connector, settings: dict[str, Any] | None = None, **options: Any
) -> Replica:
    prepare()
    extra = {"host_capacity": "64MiB", "grid": CELL, **(settings or {})}
    extra = {name: value for name, value in extra.items() if value is not None}
    return Replica(connects(**extra), NUM_RUNNING, **{**OPTIONS, **options})


@contextmanager
def running(connects: Connects = own_connector, **options: Any) -> Iterator[Replica]:
    made = replica_of(connects, **options)
    made.settle()
    yield made
    made.close()


def pieces(replica: Replica, num_steps: int) -> dict[str, list[tuple[int, int]]]:
    """Take steps. Return, by request, the first token of each piece and the one behind it."""
    found: dict[str, list[tuple[int, int]]] = {}
    schedule = replica.scheduler.schedule

    def noted(*arguments: Any, **named: Any) -> Any:
        output = schedule(*arguments, **named)
        cached = output.scheduled_cached_reqs
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, num in output.num_scheduled_tokens.items():
            found.setdefault(name, []).append((begins[name], begins[name] + num))
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica.scheduler, "schedule", noted)
        for _ in range(num_steps):
            replica.step()
    return found


@pytest.mark.parametrize("is_async", [False, True])
def test_prompts_are_computed_cell_by_cell(connects: Connects, is_async: bool) -> None:
    with running(connects, async_scheduling=is_async) as replica:
        assert [each.__name__ for each in type(replica.scheduler).__mro__[:2]] == (
            ["AsyncGridScheduler", "GridScheduler"] if is_async else ["GridScheduler", "Scheduler"]
        )
        lengths = (2 * CELL + 10, 2 * CELL, CELL - 1, 3 * CELL + 1)
        replica.begin(*lengths)
        found = pieces(replica, 30)
        for length, (name, cut) in zip(lengths, sorted(found.items()), strict=True):
            begins = [*range(0, length, CELL)]
            wanted = [*zip(begins, [*begins[1:], length], strict=True)]
            assert cut[: len(wanted)] == wanted, name
            assert all(end == begin + 1 for begin, end in cut[len(wanted) :])
            assert len(cut) > len(wanted), "it generates"
        replica.end()


def test_pool_keeps_whole_cells_of_prompts_and_nothing_that_was_generated(
    connects: Connects,
) -> None:
    with running(connects) as replica:
        replica.begin(2 * CELL + 3 * PAGE)
        for _ in range(3 * PAGE):
            replica.step()
        (request,) = replica.scheduler.running
        assert request.num_tokens > 3 * CELL
        manager = replica.scheduler.kv_cache_manager
        (blocks,) = manager.get_blocks(request.request_id).blocks
        assert [block.block_hash is not None for block in blocks[:9]] == [True] * 8 + [False]
        assert not any(block.block_hash for block in blocks[8:])
        replica.end()


def test_hit_in_the_pool_ends_with_a_cell(connects: Connects) -> None:
    with running(connects) as replica:
        manager = replica.scheduler.kv_cache_manager
        replica.begin(3 * CELL)
        for _ in range(4):
            replica.step()
        (request,) = replica.scheduler.running
        num_found = manager.get_computed_blocks(request)[1]
        assert num_found == 3 * CELL, "all of it, as it has generated tokens behind it"
        del request._all_token_ids[3 * CELL :]  # the prompt: its last token is computed again
        blocks, num_found, _ = manager.get_computed_blocks(request)
        assert num_found == 2 * CELL
        assert len(blocks.blocks[0]) == 2 * CELL // PAGE
        replica.end()


def test_tiers_keep_the_same_cells_also_of_answers_if_these_are_kept(connects: Connects) -> None:
    with running(connects, settings={"offload_prompt_only": False}) as replica:
        replica.begin(2 * CELL + 3 * PAGE)
        for _ in range(CELL):
            replica.step()
        replica.settle()
        replica.end()
        half = replica.scheduler.connector
        manager = getattr(half, "_manager", None) or half._half.manager
        assert manager.cache.usage()["host"].num_used == 2


@pytest.mark.parametrize(
    ("settings", "options", "sentence"),
    [
        ({"grid": CELL + 1}, {}, f"grid: {CELL + 1} is no multiple of 16, vLLM's"),
        ({"grid": -1}, {}, "grid: -1 is below 0"),
        ({"block_size": 2 * CELL}, {}, f"grid: {CELL} is the length of a block, too; leave"),
        ({"blocks_per_chunk": 4}, {}, f"grid: {CELL} is the length of a block, too; leave"),
        ({}, {"scheduler_cls": None}, f"needs vLLM's option --scheduler-cls {SCHEDULER}"),
        (
            {"grid": None},
            {},
            "GridScheduler needs the same grid in every connector",
        ),
        ({"grid": 2 * CELL}, {}, "a cell of 128 tokens does not fit into a step, which has 72 for"),
        (
            {},
            {"long_prefill_token_threshold": PAGE},
            f"a cell of {CELL} tokens does not fit into a step, which has {PAGE} for",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_sentence(
    connects: Connects, settings: dict[str, Any], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        replica_of(connects, settings, **options)
    assert "\n" not in str(caught.value)


def test_blocks_of_an_engine_without_a_grid_have_other_names(valkey: str) -> None:
    with replica(valkey, grid=CELL) as one, replica(valkey) as other:
        other.compute(1, 2)
        other.settle()
        assert one.load(1, 2) == 0
        one.compute(3, 4)
        one.settle()
        assert other.load(3, 4) == 0
        with replica(valkey, grid=CELL) as same:
            assert same.load(3, 4) == 2


def test_grid_of_a_connector_inside_another_one_counts() -> None:
    def inside(**settings: object) -> dict[str, Any]:
        return multi(own_connector(**settings))

    made = replica_of(inside)
    assert made.scheduler.grid == CELL
    made.close()

    def beside(**settings: object) -> dict[str, Any]:
        nothing = {
            "kv_connector": "Nothing",
            "kv_connector_module_path": "benchmarks.vllm.nothing",
            "kv_role": "kv_both",
        }
        return multi(own_connector(**settings), nothing)

    with pytest.raises(ConfigError, match="the same grid in every connector"):
        replica_of(beside)
