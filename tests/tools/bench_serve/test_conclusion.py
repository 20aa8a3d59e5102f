"""The conclusion of a run: readable for newcomers, without claims that the run cannot support."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from kvtier.tools.bench_serve.console import show_result
from kvtier.tools.bench_serve.result import ServeResult
from kvtier.tools.bench_serve.summary import conclusion
from tests.tools.bench_serve import samples

pytestmark = pytest.mark.engine


def told(result: ServeResult) -> list[str]:
    return [each.replace("\u00a0", " ") for each in conclusion(result)]


def quick(result: ServeResult) -> ServeResult:
    return replace(result, options=replace(result.options, quick=True))


def test_a_full_run_says_what_was_saved_what_it_cost_and_how_sure_that_is() -> None:
    result = samples.serve_result(samples.accuracy(), samples.ttft(), samples.overhead())
    first, disk, same, cost = told(result)
    assert first == (
        "Asked again, a prompt's answer began 96.5 % sooner: after 35 ms instead of 1,000 ms, the "
        "mean of 100 prompts of 3,500 tokens (95 % sure: 96.4 % to 96.7 %)."
    )
    assert disk.startswith("After a restart, from disk: 94.5 % sooner")
    assert same.startswith("Answers are identical: from device, host and disk, all logits of 20")
    assert "time to first token +0.4 %" in cost


def test_a_look_says_what_it_can_tell_and_what_tells_the_rest() -> None:
    overhead = samples.overhead(1.3, 0.7, num_pairs=10, prompt_tokens=1200)
    made = samples.serve_result(
        samples.accuracy(6, 1200), samples.ttft(num_prompts=12, from_device=4), overhead
    )
    found = told(quick(made))
    assert "12 prompts" in found[0]
    assert any("too small a run to tell, 10 pairs of runs where 30 are needed" in x for x in found)
    assert not any("30.0 %" in each or "T2" in each for each in found)
    assert found[-1].startswith("This was a quick run. kvtier bench serve measures at full size")


def test_too_few_prompts_have_no_share() -> None:
    (said,) = told(samples.serve_result(ttft=samples.ttft(num_prompts=5, from_device=2)))[:1]
    assert said.startswith("Asked again: 5 prompts of 3,500 tokens are too few to tell")
    assert "sooner:" not in said


def test_later_is_called_later() -> None:
    made = samples.ttft(cold_ms=20.0, device_ms=25.0, host_ms=25.0)
    assert (
        "began 25.0 % later: after 25 ms instead of 20 ms"
        in told(samples.serve_result(ttft=made))[0]
    )


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"accuracy": samples.accuracy(unequal=1)}, "The answers differ: only 19 of 20"),
        ({"accuracy": samples.accuracy(unnoticed=1)}, "damaged on purpose were not noticed"),
        ({"ttft": samples.ttft(different=3)}, "3 requests of the later passes got other logits"),
        ({"overlap": samples.overlap(same=False)}, "while it was loaded differ"),
    ],
)
def test_what_must_not_be_is_said_with_what_to_do(made: dict[str, object], words: str) -> None:
    text = " ".join(told(samples.serve_result(**made)))  # type: ignore[arg-type]
    assert words in text
    assert "report it" in text


@pytest.mark.parametrize("is_quick", [True, False])
def test_terminal_ends_with_the_conclusion_and_a_look_has_no_targets(is_quick: bool) -> None:
    result = samples.serve_result(samples.accuracy(), samples.ttft(), samples.overhead())
    result = quick(result) if is_quick else result
    text = io.StringIO()
    show_result(Console(file=text, width=400), result)
    lines = text.getvalue().splitlines()
    assert [line.rstrip() for line in lines[-len(conclusion(result)) :]] == conclusion(result)
    assert any(line.startswith("T1: ") for line in lines) is not is_quick
