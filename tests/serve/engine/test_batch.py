"""Attention of many sequences at once equals attention of each alone, in a few calls for all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.types import Slot
from kvtier.serve.engine import batch
from kvtier.serve.engine.attention import AttentionParams
from kvtier.serve.engine.batch import BatchKV, padded, tiles
from kvtier.serve.engine.models import load_model
from kvtier.serve.engine.paged import Span
from kvtier.serve.engine.pool import KVPool, Rows
from kvtier.serve.engine.runner import ModelRunner

pytestmark = pytest.mark.engine

MODELS = ("random-gqa", "random-mla")
BLOCK, NUM_BLOCKS = 16, 700
LENGTHS = [1, 2, 15, 16, 17, 18, 100, 101, 112, 113, 600, 1500, 4000]
TILE_BYTES = 256 << 10
"""Tile size at which some sequences have a tile of their own, and others share one."""
PLAIN = AttentionParams(0.3)
WINDOW = AttentionParams(0.3, window=100)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_pool(model: str, block_size: int = BLOCK) -> tuple[ModelRunner, KVPool]:
    """Return a runner and its KV pool. Fill the pool before use."""
    loaded = load_model(model, torch.device("cpu"), "auto")
    group = loaded.profile.group(block_size)
    pool = KVPool(group, NUM_BLOCKS * BLOCK // block_size, torch.device("cpu"), torch.float32)
    return ModelRunner(loaded.module, pool), pool


def fill(pool: KVPool, spans: list[Span], seed: int = 0) -> None:
    """Fill contexts with random numbers, whatever their place, and the rest with NaN."""
    pool.memory.owner.fill_(float("nan"))  # type: ignore[attr-defined]
    for layer in range(pool.group.num_layers):
        for part, shape in enumerate(pool.group.parts):
            for span in spans:
                made = torch.Generator().manual_seed(hash((seed, layer, part, span.end)))
                values = torch.randn(span.start, shape.num_heads, shape.dim, generator=made)
                if span.start:
                    pool.write(layer, part, pool.rows(span.slots, 0, span.start), values)


def scattered(lengths: list[int], seed: int, block_size: int = BLOCK) -> list[Span]:
    """Return sequences, some with adjacent slots and some with scattered ones."""
    rng = random.Random(seed)
    free = list(range(NUM_BLOCKS * BLOCK // block_size))
    spans = []
    for at, length in enumerate(lengths):
        count = -(-length // block_size) + at % 2
        if at % 3 == seed % 3:
            slots, free = free[:count], free[count:]
        else:
            slots = rng.sample(free, count)
            free = [slot for slot in free if slot not in set(slots)]
        spans.append(Span([Slot(slot) for slot in slots], length - 1, length))
    return spans


def attend(
    pool: KVPool, spans: list[Span], query: torch.Tensor, form: AttentionParams = PLAIN
) -> torch.Tensor:
    """Return the attention of layer 1, with GQA, for queries [num_sequences, num_heads, dim]."""
    heads, dim = pool.group.parts[0].num_heads, pool.group.parts[0].dim
    new = torch.stack([torch.full((heads, dim), 1 / span.end) for span in spans], 1)[None]
    kv = BatchKV(pool, spans)
    kv.update(-new, -new, 0)
    key, value = kv.update(new, 2 * new, 1)
    return kv.attend(1, query.transpose(0, 1)[None], key, value, form)[0].clone()


@pytest.mark.parametrize("form", [PLAIN, WINDOW])
@pytest.mark.parametrize("block_size", [16, 8])
@pytest.mark.parametrize("seed", range(3))
def test_a_sequence_gets_equal_bits_alone_and_in_any_company(
    monkeypatch: pytest.MonkeyPatch, seed: int, block_size: int, form: AttentionParams
) -> None:
    monkeypatch.setattr(batch, "CPU_TILE_BYTES", TILE_BYTES)
    _, pool = make_pool("random-gqa", block_size)
    spans = scattered(LENGTHS, seed, block_size)
    fill(pool, spans)
    query = torch.randn(len(spans), 4, 32, generator=torch.Generator().manual_seed(seed))
    together = attend(pool, spans, query, form)
    rng = random.Random(seed)
    for at, span in enumerate(spans):
        assert torch.equal(attend(pool, [span], query[at : at + 1], form)[0], together[at]), (
            span.end
        )
    for _ in range(5):
        some = sorted(rng.sample(range(len(spans)), 6))
        found = attend(pool, [spans[at] for at in some], query[some], form)
        assert torch.equal(found, together[some])
    elsewhere = scattered(LENGTHS, seed + 1, block_size)
    fill(pool, elsewhere)
    assert torch.equal(attend(pool, elsewhere, query, form), together)


@pytest.mark.parametrize(
    "form",
    [
        PLAIN,
        WINDOW,
        AttentionParams(0.3, window=1),
        AttentionParams(0.3, softcap=2.0),
        AttentionParams(0.3, window=33, softcap=2.0, sinks=torch.tensor([1.0, -1.0, 4.0, 0.0])),
    ],
    ids=lambda form: f"{form.window}-{form.softcap}-{form.sinks is not None}",
)
def test_attention_of_a_batch_is_that_of_each_context(
    monkeypatch: pytest.MonkeyPatch, form: AttentionParams
) -> None:
    monkeypatch.setattr(batch, "CPU_TILE_BYTES", TILE_BYTES)
    _, pool = make_pool("random-gqa")
    spans = scattered(LENGTHS, seed=5)
    fill(pool, spans)
    query = torch.randn(len(spans), 4, 32)
    found = attend(pool, spans, query, form)
    for row, span, result in zip(query, spans, found, strict=True):
        where = pool.blocks(span.slots, span.end)
        keys, values = (
            pool.read(1, part, where, span.end).transpose(0, 1).repeat_interleave(2, 0)
            for part in (0, 1)
        )
        if form.window:
            keys, values = keys[:, -form.window :], values[:, -form.window :]
        expected = by_definition(row[:, None], keys, values, form)
        torch.testing.assert_close(result, expected[:, 0], atol=4e-6, rtol=1e-5)


def by_definition(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, form: AttentionParams
) -> torch.Tensor:
    """Return the attention of one token in double precision: [num_heads, 1, dim]."""
    scores = query.double() @ keys.double().transpose(1, 2) * form.scaling
    if form.softcap:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    weights = torch.exp(scores)
    total = weights.sum(-1, keepdim=True)
    if form.sinks is not None:
        total = total + torch.exp(form.sinks.double())[:, None, None]
    return (weights / total @ values.double()).float()


def test_a_window_reads_no_more_than_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    _, pool = make_pool("random-gqa")
    spans = scattered([40, 700, 3000], seed=1)
    fill(pool, spans)
    num_rows: list[int] = []
    gather = pool.gather

    def counted(layer: int, part: int, rows: Rows) -> torch.Tensor:
        found = gather(layer, part, rows)
        num_rows.append(len(found))
        return found

    monkeypatch.setattr(pool, "gather", counted)
    attend(pool, spans, torch.randn(3, 4, 32), WINDOW)
    assert sum(num_rows) == 2 * 3 * padded(100)


@pytest.mark.parametrize("model", MODELS)
def test_a_step_of_many_agrees_with_steps_of_one(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Equal up to rounding, since the weights are multiplied with all tokens at once."""
    monkeypatch.setattr(batch, "CPU_TILE_BYTES", TILE_BYTES)
    runner, pool = make_pool(model)
    spans = scattered(random.Random(1).sample(LENGTHS, len(LENGTHS)), seed=0)
    fill(pool, spans)
    tokens = [span.end % 1000 for span in spans]
    together = runner.decode(tokens, spans)
    for at, span in enumerate(spans):
        alone = runner.decode([tokens[at]], [span])[0]
        torch.testing.assert_close(together[at], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_logits_do_not_depend_on_where_blocks_lie(model: str) -> None:
    runner, pool = make_pool(model)
    found = []
    for seed in range(3):
        spans = scattered([40, 700, 33, 3000], seed)
        fill(pool, spans)
        found.append([runner.decode([7], spans[:1]), runner.decode([7, 8, 9, 10], spans)])
    for one, many in found[1:]:
        assert torch.equal(one, found[0][0])
        assert torch.equal(many, found[0][1])


@pytest.mark.parametrize("model", MODELS)
def test_calls_per_layer_do_not_grow_with_the_sequences(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    runner, pool = make_pool(model)
    calls: Counter[str] = Counter()

    def counted(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: object, **options: object) -> object:
            calls[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for name in ("write", "gather", "read", "rows", "blocks", "on_device"):
        counted(pool, name)
    counted(batch, "attention")

    def of_a_step(num_sequences: int) -> dict[str, int]:
        spans = scattered([20 + at % 5 for at in range(num_sequences)], seed=0)
        fill(pool, spans)
        calls.clear()
        runner.decode([5] * num_sequences, spans)
        return dict(calls)

    few = of_a_step(4)
    assert few == of_a_step(64)
    num_layers = pool.group.num_layers
    assert few["attention"] == num_layers
    assert few["write"] == few["gather"] == 2 * num_layers
    assert few.keys() <= {"attention", "write", "gather", "on_device"}
    assert few["on_device"] <= 3, "what is the same in all layers is made once"


@settings(max_examples=200)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=100), st.sampled_from([64, 2048, 10**6]))
def test_tiles_hold_everybody_and_little_padding(lengths: list[int], tile_tokens: int) -> None:
    ends = sorted(lengths)
    bounds = list(tiles(ends, tile_tokens))
    assert [at for first, last in bounds for at in range(first, last)] == list(range(len(ends)))
    for first, last in bounds:
        num_rows = (last - first) * padded(ends[last - 1])
        num_used = sum(map(padded, ends[first:last]))
        assert last - first == 1 or num_rows <= tile_tokens
        assert last - first == 1 or ends[last - 1] <= tile_tokens // 2
        slack = max(batch.PADDING_TOKENS, num_used // 4)
        assert last - first == 1 or num_rows - num_used <= slack
