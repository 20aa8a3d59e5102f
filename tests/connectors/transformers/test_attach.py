"""An attached model answers as it would alone on the same grid, whatever it restores."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
import threading
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Qwen3ForCausalLM

import kvtier
from kvtier.connectors.transformers.attached import Attached
from kvtier.connectors.transformers.cache_layers import CACHE_FIELD, INDEXED
from kvtier.core.config import CacheConfig
from kvtier.core.errors import ConfigError, UsageError
from kvtier.core.types import LoadPolicy
from tests.connectors.transformers.models import (
    CHUNK,
    answer,
    are_equal,
    on_grid,
    other_model,
    prompt,
    small_model,
)

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]


def attached(model: Any, **changes: Any) -> Attached:
    """Attach with room for 64 chunks."""
    settings: dict[str, Any] = {"host_capacity": "1MiB", "chunk_tokens": CHUNK}
    return kvtier.attach(model, **settings | changes)


def test_eight_prompts_equal_the_grid_when_cold_and_from_host() -> None:
    model = small_model()
    prompts = [prompt(seed, 90 + seed, shared=50) for seed in range(8)]
    expected = [on_grid(model, ids) for ids in prompts]
    with attached(model) as cache:
        cold = [answer(model, ids) for ids in prompts]
        first = cache.stats()
        warm = [answer(model, ids) for ids in prompts]
        second = cache.stats()
    assert all(map(are_equal, cold, expected))
    assert all(map(are_equal, warm, expected))
    assert first.reused_tokens == {"host": 7 * 48}  # of the 50 that they share
    assert second.num_reused_tokens - first.num_reused_tokens == sum(
        (ids.shape[1] - 1) // CHUNK * CHUNK for ids in prompts
    )
    assert (second.num_prompts, second.num_prompt_tokens) == (16, 2 * sum(range(90, 98)))
    assert not any(are_equal(one, other) for one, other in pairwise(cold))


def test_a_prompt_of_whole_chunks_computes_its_last_one() -> None:
    model, ids = small_model(), prompt(0, 4 * CHUNK)
    expected = on_grid(model, ids)
    with attached(model) as cache:
        assert are_equal(answer(model, ids), expected)
        assert are_equal(answer(model, ids), expected)
        assert cache.stats().num_reused_tokens == 3 * CHUNK


RESTART = """
import sys, torch, kvtier
from tests.connectors.transformers.models import *
torch.set_num_threads(1)
model = small_model()
prompts = [prompt(seed, 90 + seed, shared=50) for seed in range(8)]
expected = [on_grid(model, ids) for ids in prompts]
kvtier.attach(
    model, host_capacity="1MiB", disk_path=sys.argv[1], disk_capacity="8MiB", chunk_tokens=CHUNK
)
assert all(are_equal(answer(model, ids), right) for ids, right in zip(prompts, expected))
print(model.kvtier.stats().reused_tokens)
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_new_process_finds_everything_on_disk_without_flush_or_detach(tmp_path: Path) -> None:
    def run() -> str:
        command = [sys.executable, "-W", "error", "-c", RESTART, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run() == repr({"host": 7 * 48})
    told = eval(run())
    assert sum(told.values()) == sum((90 + seed - 1) // CHUNK * CHUNK for seed in range(8))
    assert told["disk"] >= 80  # the first prompt's, and what each has of its own


def test_four_threads_answer_as_one() -> None:
    model = small_model()
    prompts = [prompt(seed, 80 + seed, shared=40) for seed in range(8)]
    expected = [on_grid(model, ids) for ids in prompts]
    found: dict[tuple[int, int], Any] = {}

    def ask(thread: int) -> None:
        for turn in range(2):
            for at in range(8):
                which = (at + 2 * thread) % 8
                found[thread, turn * 8 + which] = answer(model, prompts[which])

    with attached(model) as cache:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = cache.stats()
    assert len(found) == 64
    assert all(are_equal(one, expected[at % 8]) for (_, at), one in found.items())
    assert (stats.num_prompts, stats.num_without_room) == (64, 0)
    assert stats.num_reused_tokens >= 4 * sum((79 + seed) // CHUNK * CHUNK for seed in range(8))


def test_generated_tokens_are_kept_for_the_next_turn() -> None:
    model, ids = small_model(), prompt(0, 3 * CHUNK + 4)
    turn, _ = answer(model, ids, max_new_tokens=2 * CHUNK)
    again = torch.cat([turn, prompt(5, 9)], dim=1)
    expected = on_grid(model, again)
    with attached(model) as cache:
        assert torch.equal(answer(model, ids, max_new_tokens=2 * CHUNK)[0], turn)
        assert cache.stats().num_kept_tokens == 2 * CHUNK
        assert are_equal(answer(model, again), expected)
        assert cache.stats().num_reused_tokens == 5 * CHUNK
        before = cache.stats().num_kept_tokens
        answer(model, ids, max_new_tokens=2 * CHUNK)
        assert cache.stats().num_kept_tokens == before  # known ones are not counted again
    with attached(model, keep_generated=False) as cache:
        answer(model, ids, max_new_tokens=2 * CHUNK)
        assert are_equal(answer(model, again), expected)
        assert cache.stats().num_kept_tokens == 0
        assert cache.stats().num_reused_tokens == 3 * CHUNK


def test_tokens_after_a_short_prompt_are_kept() -> None:
    model, ids = small_model(), prompt(0, 5)
    alone = answer(model, ids, max_new_tokens=2 * CHUNK)
    with attached(model) as cache:
        found = answer(model, ids, max_new_tokens=2 * CHUNK)
        assert are_equal(found, alone)
        assert cache.stats().num_kept_tokens == 2 * CHUNK
        assert dict(cache.stats().passed) == {"prompts shorter than a chunk": 1}
        assert are_equal(answer(model, found[0]), on_grid_of_a_copy(model, found[0]))
        assert cache.stats().num_reused_tokens == 2 * CHUNK


def on_grid_of_a_copy(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    """Return the right answer while the model is attached."""
    copied = copy.deepcopy(model)
    assert copied.kvtier is None
    return on_grid(copied, ids, **options)


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of a batch, padded on the left."""
    width = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, width - row.shape[1] :] = row
        mask[at, width - row.shape[1] :] = 1
    return ids, mask


def test_each_row_of_a_padded_batch_begins_as_it_would_alone() -> None:
    model = small_model()
    rows = [prompt(seed, 40 + 13 * seed, shared=32) for seed in range(4)]
    rows.append(rows[1])
    alone = [on_grid(model, row) for row in rows]
    ids, mask = padded(rows)
    plain = answer(model, ids, attention_mask=mask)
    with attached(model) as cache:
        for num_reused in (3 * 32, 3 * 32 + 32 + 48 + 64 + 64):
            found = answer(model, ids, attention_mask=mask)
            for at, right in enumerate(alone):
                assert torch.equal(found[1][0, at], right[1][0, 0])
            assert torch.equal(found[0], plain[0])
            torch.testing.assert_close(found[1], plain[1], rtol=1e-3, atol=1e-4)
            assert cache.stats().num_reused_tokens == num_reused
        for row, right in zip(rows, alone, strict=True):
            assert are_equal(answer(model, row), right)
        assert not cache.stats().passed


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3, "max_new_tokens": 40},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 5},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_other_ways_to_generate_are_right(options: dict[str, Any]) -> None:
    model = small_model()
    ids = prompt(0, 60)
    torch.manual_seed(5)
    expected = answer(model, ids, **options)
    with attached(model) as cache:
        for _ in range(2):
            torch.manual_seed(5)
            found = answer(model, ids, **options)
            assert torch.equal(found[0], expected[0])
            torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-3)
        assert cache.stats().num_reused_tokens >= 48


def test_an_assistant_model_helps_an_attached_one() -> None:
    model, helper, ids = small_model(), small_model(3), prompt(0, 60)
    expected = answer(model, ids, max_new_tokens=40)
    with attached(model) as cache, attached(helper):
        for _ in range(2):
            found = answer(model, ids, max_new_tokens=40, assistant_model=helper)
            assert torch.equal(found[0], expected[0])
        assert cache.stats().num_reused_tokens >= 48
        again = answer(model, found[0])
        assert are_equal(again, on_grid_of_a_copy(model, found[0]))


def test_a_plain_call_reuses_and_gives_the_logits_asked_for() -> None:
    model, ids = small_model(), prompt(0, 4 * CHUNK + 3)

    def ask(**options: Any) -> Any:
        with torch.inference_mode():
            return model(input_ids=ids, **options)

    everything = ask().logits
    with attached(model) as cache:
        for num in (1, 2, 20):
            found = ask(logits_to_keep=num)
            torch.testing.assert_close(found.logits, everything[:, -num:], rtol=1e-3, atol=1e-4)
            assert found[CACHE_FIELD].get_seq_length() == ids.shape[1]
        assert cache.stats().num_reused_tokens == 64 + 32
        assert torch.equal(ask().logits, everything)
        assert dict(cache.stats().passed) == {"logits of the whole prompt": 1}


class OlderCode(Qwen3ForCausalLM):
    """A model whose code, from its checkpoint, names the cache as transformers did before 5.24."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        logits_to_keep: Any = 0,
        **others: Any,
    ) -> Any:
        return super().forward(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            logits_to_keep=logits_to_keep,
            **others,
        )


@pytest.mark.parametrize("kind", [Qwen3ForCausalLM, OlderCode])
def test_the_cache_is_taken_by_its_name_before_transformers_5_24(
    kind: type[Qwen3ForCausalLM],
) -> None:
    like, ids = small_model(), prompt(0, 4 * CHUNK + 3)
    model: Any = kind(like.config).eval()
    model.load_state_dict(like.state_dict())
    expected = on_grid(like, ids, max_new_tokens=1)[1][0]
    with attached(model) as cache, torch.inference_mode():
        for num_reused in (0, 64):
            held = DynamicCache(config=model.config)
            found = model(input_ids=ids, past_key_values=held, logits_to_keep=1)
            assert torch.equal(found.logits[:, -1], expected)
            assert held.get_seq_length() == ids.shape[1]
            assert cache.stats().num_reused_tokens == num_reused
        assert not cache.stats().passed


# -- weights -------------------------------------------------------------------------------------


def test_changed_weights_never_match() -> None:
    model, ids = small_model(), prompt(0)
    with attached(model) as cache:
        answer(model, ids)
        before = cache.stats().num_reused_tokens
        weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
        attention = model.get_submodule("model.layers.0.self_attn")
        for change in (
            lambda: weight.data[3, 5].add_(1),
            lambda: setattr(weight, "data", weight.data * 1.01),
            lambda: setattr(attention, "scaling", attention.scaling * 1.1),
        ):
            change()
            right = on_grid_of_a_copy(model, ids)
            for num_reused in (0, 96):
                assert are_equal(answer(model, ids), right)
                before += num_reused
                assert cache.stats().num_reused_tokens == before


def test_weights_that_differ_in_one_bit_find_nothing_on_disk(tmp_path: Path) -> None:
    ids = prompt(0)
    for num_reused, change in ((0, 0.0), (96, 0.0), (0, 2.0**-20)):
        model = small_model()
        with torch.no_grad():
            model.get_parameter("model.layers.0.mlp.up_proj.weight")[0, 0] += change
        right = on_grid(model, ids)
        with attached(model, disk_path=str(tmp_path), disk_capacity="8MiB") as cache:
            assert are_equal(answer(model, ids), right)
            assert cache.stats().num_reused_tokens == num_reused


def test_tenants_with_different_salts_share_nothing(tmp_path: Path) -> None:
    model, ids = small_model(), prompt(0)
    for salt, num_reused in (("a", 0), ("b", 0), ("a", 96)):
        with attached(model, salt=salt, disk_path=str(tmp_path), disk_capacity="8MiB") as cache:
            answer(model, ids)
            assert cache.stats().num_reused_tokens == num_reused


# -- calls that are passed through ---------------------------------------------------------------


def passing() -> dict[str, dict[str, Any]]:
    """Return calls of 40 tokens that nothing may be restored for, by the reason."""
    ids = prompt(0, 40)
    mask = torch.ones_like(ids)
    mask[:, -3:] = 0
    causal = torch.full((1, 1, 40, 40), -1e9).triu(1)
    given = {"input_ids": ids, "logits_to_keep": 1}
    return {
        "labels was given": given | {"labels": ids, "logits_to_keep": 0},
        "output_hidden_states was given": given | {"output_hidden_states": True},
        "use_cache is off": given | {"use_cache": False},
        "tuples are wanted": given | {"return_dict": False},
        "padding that is not on the left": given | {"attention_mask": mask},
        "a mask of its own": given | {"attention_mask": causal},
        "custom position_ids": given | {"position_ids": torch.arange(2, 42)[None]},
    }


@pytest.mark.parametrize("reason", passing())
def test_calls_that_want_something_else_are_passed_through(reason: str) -> None:
    model, call = small_model(), passing()[reason]
    with torch.no_grad():
        alone = model(**call)
        with attached(model) as cache:
            answer(model, call["input_ids"])
            found = model(**call)
            assert torch.equal(found[0], alone[0])
            assert dict(cache.stats().passed) == {reason: 1}


def test_training_goes_on_as_before() -> None:
    model, ids = small_model(), prompt(0, 40)
    model(input_ids=ids, labels=ids).loss.backward()
    right = model.get_parameter("model.embed_tokens.weight").grad.clone()
    with attached(model) as cache:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        assert torch.equal(model.get_parameter("model.embed_tokens.weight").grad, right)
        model(input_ids=ids, logits_to_keep=1, use_cache=True)
        model.train()
        with torch.no_grad():
            model(input_ids=ids, logits_to_keep=1, use_cache=True)
        assert sorted(cache.stats().passed) == [
            "gradients are recorded",
            "labels was given",
            "the model is in training mode",
        ]


def test_a_hook_sees_every_token() -> None:
    model, ids, seen = small_model(), prompt(0, 40), []
    with attached(model) as cache:
        answer(model, ids)
        layer = model.get_submodule("model.layers.0")
        handle = layer.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[1]))
        answer(model, ids, max_new_tokens=1)
        assert seen == [40]
        handle.remove()
        answer(model, ids)
        assert cache.stats().num_reused_tokens == 32
        assert dict(cache.stats().passed) == {"forward hooks": 1}


def test_a_static_cache_is_left_alone() -> None:
    model, ids = small_model(), prompt(0, 40)
    options = {"cache_implementation": "static", "disable_compile": True}
    alone = answer(model, ids, **options)
    with attached(model) as cache:
        assert are_equal(answer(model, ids, **options), alone)
        assert dict(cache.stats().passed) == {"a StaticCache": 1}


@pytest.mark.parametrize("window", [9, 16, 17, 40])
def test_a_model_with_windows_equals_the_grid(window: int) -> None:
    model = other_model("mistral", sliding_window=window)
    prompts = [prompt(seed, 90 + seed, shared=50) for seed in range(2)]
    expected = [on_grid(model, ids) for ids in prompts]
    with attached(model) as cache:
        for ids, right in zip([*prompts, *prompts], [*expected, *expected], strict=True):
            assert are_equal(answer(model, ids), right)
        assert cache.stats().num_reused_tokens == 48 + 80 + 80
        ids, mask = padded(prompts)
        found = answer(model, ids, attention_mask=mask)
        for at, (tokens, logits) in enumerate(expected):
            assert torch.equal(found[0][at, -4:], tokens[0, -4:])
            torch.testing.assert_close(found[1][:, at], logits[:, 0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
def test_a_model_with_recurrent_layers_is_restored_at_snapshots(kind: str, tmp_path: Path) -> None:
    model = other_model(kind)
    first, fork = prompt(0, 100), prompt(1, 100, shared=50)
    first[:, :50] = fork[:, :50]
    longer = torch.cat([first, prompt(5, 40)], dim=1)
    expected = {ids: on_grid(model, ids) for ids in (first, fork, longer)}
    disk = {"disk_path": str(tmp_path), "disk_capacity": "8MiB", "host_capacity": "2MiB"}
    always = CacheConfig(load_policy=LoadPolicy.ALWAYS)
    reused = [(first, 0), (first, 96), (fork, 0), (fork, 96), (longer, 96), (longer, 128)]
    with attached(model, **disk, settings=always) as cache:
        assert cache.stats().bytes_per_snapshot > 0
        for ids, num in reused:
            before = cache.stats().num_reused_tokens
            assert are_equal(answer(model, ids), expected[ids])
            assert cache.stats().num_reused_tokens - before == num
        ids, mask = padded([first, longer])
        found = answer(model, ids, attention_mask=mask)
        for at, each in enumerate((first, longer)):
            assert torch.equal(found[1][0, at], expected[each][1][0, 0])
    with attached(model, **disk, settings=always) as cache:
        for ids in (longer, fork):
            assert are_equal(answer(model, ids), expected[ids])
        assert cache.stats().reused_tokens == {"disk": 128 + 96 - 48, "host": 48}


@pytest.mark.skipif(not INDEXED, reason="a transformers without cache layers for an indexer")
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexers_keys_are_restored_with_the_latents(kind: str, tmp_path: Path) -> None:
    """The indexer chooses 64 of 150 tokens, so its keys decide on the logits."""
    model, ids = other_model(kind), prompt(0, 150)
    expected = on_grid(model, ids)
    disk = {"disk_path": str(tmp_path), "disk_capacity": "8MiB"}
    for found in ("host", "disk"):
        with attached(model, **disk) as cache:
            assert are_equal(answer(model, ids), expected)
            assert are_equal(answer(model, ids), expected)
            assert cache.stats().reused_tokens[found] >= 9 * CHUNK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["bert", "jamba"])
def test_a_model_that_does_not_continue_its_own_cache_is_refused(
    kind: str, dtype: torch.dtype
) -> None:
    """Encoders look ahead, and Jamba drops its state."""
    model = other_model(kind).to(dtype)
    alone = answer(model, prompt(0, 40))
    with attached(model) as cache:
        assert "computed in two parts" in cache.stats().refused
        assert "forward" not in vars(model)
        assert are_equal(answer(model, prompt(0, 40)), alone)


def test_rotary_embeddings_that_depend_on_the_length_are_refused() -> None:
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with attached(small_model(rope_parameters=scaled)) as cache:
        assert "dynamic" in cache.stats().refused


# -- room, failures and ends ---------------------------------------------------------------------


def test_of_a_prompt_that_does_not_fit_the_beginning_is_reused() -> None:
    model, ids = small_model(), prompt(0, 12 * CHUNK + 5)
    right = on_grid(model, ids)
    with attached(model, host_capacity=8 * 12288) as cache:
        for num_reused in (0, 7 * CHUNK):
            assert are_equal(answer(model, ids), right)
            assert cache.stats().num_reused_tokens == num_reused


def test_a_closed_cache_fails_no_prompt() -> None:
    model, ids = small_model(), prompt(0)
    right = on_grid(model, ids)
    cache = attached(model)
    assert are_equal(answer(model, ids), right)
    cache._cache.close()
    assert torch.equal(answer(model, ids, max_new_tokens=40)[1][:4], right[1])
    cache.detach()


def test_a_forked_child_answers_without_the_cache() -> None:
    model, ids = small_model(), prompt(0)
    right = on_grid(model, ids)
    with attached(model) as cache:
        answer(model, ids)
        with cache._cache._condition, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # threads exist
            child = os.fork()  # while the lock is held
            if child == 0:
                os._exit(0 if are_equal(answer(model, ids), right) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert are_equal(answer(model, ids), right)


def test_detach_leaves_the_model_as_it_was() -> None:
    model = small_model()
    before = {*vars(model)}
    cache = attached(model)
    assert model.kvtier is cache
    assert "logits_to_keep" in inspect.signature(model.forward).parameters
    with pytest.raises(UsageError, match="attached already"):
        attached(model)
    with pytest.raises(UsageError, match="pickled"):
        pickle.dumps(model)
    cache.detach()
    cache.detach()
    assert cache.flush()  # detaching has done it
    assert {*vars(model)} == before
    pickle.dumps(model)
    assert not [each for each in threading.enumerate() if each.name == "kvtier-progress"]


@pytest.mark.parametrize("given", [torch.nn.Linear, torch.nn.Linear(1, 1), "a/name", None])
def test_what_is_no_model_of_transformers_is_refused_in_a_sentence(given: Any) -> None:
    with pytest.raises(UsageError, match="is no model of transformers; give what"):
        kvtier.attach(given)


def test_settings_that_are_not_possible_are_told_and_change_nothing() -> None:
    model = small_model()
    for changes, sentence in (
        ({"host_capacity": 100}, "room for 0 blocks"),
        ({"host_capacity": "900TiB"}, "does not fit"),
        ({"chunk_tokens": 0}, "below 1"),
        ({"disk_path": "/proc/nowhere"}, "nowhere"),
    ):
        with pytest.raises(Exception, match=sentence) as caught:
            attached(model, **changes)
        assert isinstance(caught.value, (ConfigError, OSError))
        assert not hasattr(model, "kvtier")
        assert "forward" not in vars(model)
