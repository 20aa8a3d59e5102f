"""``KvtierConnector`` with several KV groups: needs of a load, and pages that vLLM frees early."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.connectors.vllm.shared.reach import WHOLE, GroupReach, Kind, reach_of
from kvtier.core.errors import ConfigError
from kvtier.core.types import HOST
from tests.connectors.kv_harness import LAYERS, NOTHING_CACHED, PAGE, KvHarness

WINDOW = GroupReach(Kind.WINDOW, PAGE + 2)
"""It reaches into two pages."""
CHUNK = GroupReach(Kind.CHUNK, 2 * PAGE)
STATE = GroupReach(Kind.STATE)
TEXT = "abcdefghijklmnopqrstuvwx"
NUM = len(TEXT) // PAGE

Make = Callable[..., KvHarness]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[KvHarness] = []

    def one(*reaches: GroupReach, **options: Any) -> KvHarness:
        made.append(KvHarness(num_slots=64, reaches=(WHOLE, *reaches), **options))
        return made[-1]

    yield one
    for each in made:
        each.close()


def _bytes(harness: KvHarness, group: int, pages: Sequence[int]) -> list[torch.Tensor]:
    names = [f"{name}{group or ''}" for name in LAYERS]
    return [caches[name][:, list(pages)].clone() for caches in harness.caches for name in names]


def _step(harness: KvHarness, name: str, tables: Any, before: int, num: int, **more: Any) -> None:
    """Compute a part of a new request's prompt, or of one that has run."""
    if before and not more.pop("is_new", False):
        cached = SimpleNamespace(
            req_ids=[name],
            resumed_req_ids=set(),
            new_block_ids=[tables],
            num_computed_tokens=[before],
        )
        harness.step(cached=cached, num_scheduled={name: num}, **more)
        return
    new = SimpleNamespace(req_id=name, block_ids=tables, num_computed_tokens=before)
    output: Any = SimpleNamespace(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=NOTHING_CACHED,
        num_scheduled_tokens={name: num},
        total_num_scheduled_tokens=num,
        scheduled_spec_decode_tokens={},
        preempted_req_ids=None,
        **more,
    )
    harness.run(harness.half.take_step(output), ends=more.get("ends", True))


def _serve(harness: KvHarness, *tables: Sequence[int], parts: Sequence[int] = (len(TEXT),)) -> Any:
    """Compute a prompt in steps of so many tokens, and finish it."""
    request = harness.request("first", TEXT)
    assert harness.asks(request) == 0
    before = 0
    for number, num in enumerate(parts):
        tables_now = tuple(list(table) for table in tables)
        _step(harness, "first", tables_now if not number else None, before, num)
        before += num
    request.num_computed_tokens = len(TEXT)
    harness.half.finish(request, [()] * len(tables))
    return request


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_window_comes_with_the_pages_that_reach_the_end_of_the_load(
    make: Make, num_ranks: int
) -> None:
    harness = make(WINDOW, num_ranks=num_ranks)
    harness.fill(range(1, 13), seed=1)
    _serve(harness, range(1, 7), range(7, 13))
    whole, window = _bytes(harness, 0, range(1, 7)), _bytes(harness, 1, range(11, 13))
    harness.fill(range(1, 24), seed=2)
    again = harness.request("again", TEXT + "s")
    assert harness.asks(again) == len(TEXT)
    harness.gets_pages(again, range(1, 8), len(TEXT), [0, 0, 0, 0, 13, 14, 15])
    harness.step()
    assert harness.loaded == {"again"}
    assert all(map(torch.equal, _bytes(harness, 0, range(1, 7)), whole))
    assert all(map(torch.equal, _bytes(harness, 1, [13, 14]), window))


def test_load_ends_where_every_group_has_what_it_needs(make: Make) -> None:
    """A prompt that was computed in two steps has a state behind each."""
    harness = make(STATE)
    _serve(harness, range(1, 7), (0, 0, 8, 0, 0, 0), parts=(3 * PAGE, 3 * PAGE))
    assert harness.half.manager.cache.usage()[HOST].num_used == NUM + 1
    again = harness.request("again", TEXT + "s")
    assert harness.asks(again) == 3 * PAGE
    harness.gets_pages(again, range(1, 8), 3 * PAGE, [0, 0, 9, 10])
    assert harness.asks(harness.request("other", TEXT[: 2 * PAGE] + "s")) == 0, "no state"
    assert harness.asks(harness.request("third", TEXT + "s"), 3 * PAGE) == 0


def test_states_that_vllm_offers_are_stored_from_the_pages_it_names(make: Make) -> None:
    harness = make(STATE)
    request = harness.request("first", TEXT)
    harness.asks(request)
    harness.fill([20], seed=3)
    state = _bytes(harness, 1, [20])
    offers = {"first": [(1, 20, 2 * PAGE), (1, 21, 2 * PAGE + 1)], "gone": [(1, 22, PAGE)]}
    block_state = SimpleNamespace(boundary_state_offloads=offers)
    tables = (list(range(1, 7)), [0, 0, 0, 0, 0, 7])
    _step(harness, "first", tables, 0, len(TEXT), kv_connector_block_state=block_state)
    assert harness.half.manager.cache.usage()[HOST].num_used == NUM + 1, "none but that"
    again = harness.request("again", TEXT + "s")
    assert harness.asks(again) == 2 * PAGE
    harness.gets_pages(again, range(1, 8), 2 * PAGE, [0, 9])
    harness.step()
    assert all(map(torch.equal, _bytes(harness, 1, [9]), state))


def test_block_whose_page_passes_to_another_request_during_its_store_is_lost(make: Make) -> None:
    """The blocks of layers of whole prompts stay, whose pages vLLM does not free meanwhile."""
    harness = make(WINDOW)
    request = harness.request("first", TEXT)
    harness.asks(request)
    tables = (list(range(1, 7)), list(range(7, 13)))
    _step(harness, "first", tables, 0, len(TEXT), ends=False)
    other = harness.request("other", "wholly other text")
    harness.asks(other)
    _step(harness, "other", ([13, 14, 15, 16], [12, 17, 18, 19]), 0, 4 * PAGE)
    harness.hear()
    assert harness.asks(harness.request("again", TEXT + "s")) == 5 * PAGE
    assert not harness.half._read, "nothing is left of stores that have ended"


def test_pages_in_front_of_a_window_are_not_stored_later(make: Make) -> None:
    """vLLM may have given them to others since."""
    harness = make(WINDOW)
    request = harness.request("first", TEXT)
    hashes, request.block_hashes = request.block_hashes, []
    harness.asks(request)
    _step(harness, "first", (list(range(1, 5)), list(range(7, 11))), 0, 4 * PAGE)
    request.block_hashes = hashes
    _step(harness, "first", ([5, 6], [11, 12]), 4 * PAGE, 2 * PAGE)
    # The window behind 16 tokens begins with token 11.
    assert harness.half.manager.cache.usage()[HOST].num_used == NUM + 4
    assert harness.asks(harness.request("again", TEXT + "s")) == len(TEXT)


@pytest.mark.parametrize("num", [2, 3])
def test_block_of_several_pages_is_stored_with_those_that_are_left_of_it(
    make: Make, num: int
) -> None:
    harness = make(STATE, num=num)
    harness.fill([7], seed=5)
    state = _bytes(harness, 1, [7])
    _serve(harness, range(1, 7), [0] * 5 + [7])
    again = harness.request("again", TEXT + "s")
    assert harness.asks(again) == len(TEXT)
    harness.gets_pages(again, range(1, 8), len(TEXT), [0] * 5 + [20, 21])
    harness.step()
    assert all(map(torch.equal, _bytes(harness, 1, [20]), state))


def test_chunk_that_begins_anew_needs_nothing(make: Make) -> None:
    harness = make(CHUNK)
    _serve(harness, range(1, 7), range(7, 13))
    again = harness.request("again", TEXT + "s")
    assert harness.asks(again) == len(TEXT)
    harness.gets_pages(again, range(1, 8), len(TEXT), [0] * 6 + [20])
    harness.step()
    assert harness.loaded == {"again"}


class FullAttentionSpec:
    sliding_window = 64


class SlidingWindowSpec:
    sliding_window = 64
    extra_retained_tokens = 3


class SlidingWindowMLASpec(SlidingWindowSpec):
    extra_retained_tokens = 0


class ChunkedLocalAttentionSpec:
    attention_chunk_size = 32


class MambaSpec:
    mamba_cache_mode = "align"


class _Kept(MambaSpec):
    mamba_cache_mode = "all"


class RSWASpec(FullAttentionSpec):
    pass


@pytest.mark.parametrize(
    ("spec", "first"),
    [
        (FullAttentionSpec(), 0),
        (SlidingWindowSpec(), 100 - 66),
        (SlidingWindowMLASpec(), 100 - 63),
        (ChunkedLocalAttentionSpec(), 96),
        (MambaSpec(), 99),
        (_Kept(), 99),
    ],
)
def test_reach_is_what_vllms_allocator_keeps(spec: object, first: int) -> None:
    assert reach_of(spec).first_needed(100) == first
    assert reach_of(spec).first_needed(0) == 0


@pytest.mark.parametrize("spec", [RSWASpec(), object()])
def test_layers_of_another_kind_are_refused_by_name(spec: object) -> None:
    with pytest.raises(ConfigError, match=f"layers of {type(spec).__name__}: use Offloading"):
        reach_of(spec)
