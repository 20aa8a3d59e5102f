"""Blocks of several KV groups that a cut of a prompt needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier.connectors.vllm.shared.names import EngineFacts, GroupFacts
from kvtier.connectors.vllm.shared.prompt import RequestBlocks, group_key
from kvtier.connectors.vllm.shared.reach import Cuts


class FullAttentionSpec:
    sliding_window = 128  # as in vLLM, where windows are laid out as full attention


class MambaSpec:
    pass


class SlidingWindowSpec:
    def __init__(self, window: int, extra: int = 0) -> None:
        self.sliding_window = window
        self.extra_retained_tokens = extra


class SlidingWindowMLASpec(SlidingWindowSpec):
    pass


Given = tuple[int, object]


def cuts(*groups: Given, pages_per_block: int = 1, draft: int | None = None) -> Cuts:
    """Return the cuts of an engine. groups: tokens per page, and spec. draft: a draft's group."""
    facts = EngineFacts(
        tuple(GroupFacts(at, size, ()) for at, (size, _) in enumerate(groups)),
        0,
        pages_per_block,
        16,
        "",
    )
    vllm_groups = [
        SimpleNamespace(kv_cache_spec=spec, is_eagle_group=at == draft)
        for at, (_, spec) in enumerate(groups)
    ]
    return Cuts.of(facts, vllm_groups)


def needed(found: Cuts, group: int, size: int, up_to: int) -> list[int]:
    """Return where the blocks of a group end that a cut needs."""
    key = group_key(b"prefix", group)
    return [end for end in range(size, up_to + 1, size) if found.need(key, end)]


@pytest.mark.parametrize("kind", [SlidingWindowSpec, SlidingWindowMLASpec])
def test_of_a_window_the_blocks_in_front_of_a_cut_are_needed(
    kind: type[SlidingWindowSpec],
) -> None:
    found = cuts((256, FullAttentionSpec()), (64, kind(128)))
    assert needed(found, 0, 256, 512) == [256, 512]
    assert needed(found, 1, 64, 512) == [192, 256, 448, 512]


@pytest.mark.parametrize(
    ("spec", "ends"),
    [
        (SlidingWindowSpec(65), [256]),
        (SlidingWindowSpec(66), [192, 256]),
        (SlidingWindowSpec(65, extra=1), [192, 256]),
        (SlidingWindowSpec(257), [64, 128, 192, 256]),
        (SlidingWindowSpec(4096), [64, 128, 192, 256]),
        (FullAttentionSpec(), [64, 128, 192, 256]),
    ],
)
def test_as_many_blocks_are_needed_as_a_window_reaches(spec: object, ends: list[int]) -> None:
    assert needed(cuts((256, FullAttentionSpec()), (64, spec)), 1, 64, 256) == ends


def test_a_cut_is_where_full_attention_and_states_have_ends() -> None:
    found = cuts((16, FullAttentionSpec()), (16, SlidingWindowSpec(32)), (256, MambaSpec()))
    assert needed(found, 0, 16, 64) == [16, 32, 48, 64]
    assert needed(found, 1, 16, 512) == [240, 256, 496, 512]
    assert needed(found, 2, 256, 512) == [256, 512]


def test_a_window_whose_blocks_do_not_end_at_cuts_keeps_all() -> None:
    assert needed(cuts((48, FullAttentionSpec()), (32, SlidingWindowSpec(33))), 1, 32, 96) == [
        32,
        64,
        96,
    ]
    assert needed(cuts((64, SlidingWindowSpec(65))), 0, 64, 192) == [64, 128, 192]


def test_a_draft_reads_a_block_behind_the_cut() -> None:
    found = cuts((256, FullAttentionSpec()), (64, SlidingWindowSpec(65)), draft=1)
    assert needed(found, 1, 64, 576) == [256, 320, 512, 576]


def test_a_block_may_be_several_pages() -> None:
    found = cuts((64, FullAttentionSpec()), (16, SlidingWindowSpec(33)), pages_per_block=4)
    assert needed(found, 1, 64, 512) == [256, 512]


def test_layers_of_one_kind_may_have_a_spec_each() -> None:
    apart = SimpleNamespace(kv_cache_specs={"a": SlidingWindowSpec(65)})
    assert needed(cuts((256, FullAttentionSpec()), (64, apart)), 1, 64, 512) == [256, 512]


def test_a_path_has_the_blocks_that_a_cut_needs_in_the_order_of_the_prompt() -> None:
    ends = {group_key(b"256", 0): 256}
    ends |= {group_key(b"%d" % end, 1): end for end in (64, 128, 192, 256, 300)}
    found = cuts((256, FullAttentionSpec()), (64, SlidingWindowSpec(128)))
    path = RequestBlocks("", ends).path(64, found)
    assert path == [group_key(b"192", 1), group_key(b"256", 0), group_key(b"256", 1)]
