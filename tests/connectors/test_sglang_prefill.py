"""Times of SGLang's steps, as its scheduler's own calls report them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvtier.connectors.sglang.shared.prefill import SCHEDULER, PrefillWatch


class Steps:
    """A hooked scheduler whose steps take as long as a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.seen: list[tuple[int, int, float]] = []
        self.watch = PrefillWatch(lambda: self.now_s)
        self._hooks = self.watch.hooks()

    def listen(self) -> None:
        self.watch.step_listeners.append(self._observe)

    def _observe(self, num_before: int, num_tokens: int, seconds: float) -> None:
        self.seen.append((num_before, num_tokens, seconds))

    def begin(self, before: list[int], new: list[int], is_extend: bool = True) -> object:
        mode = SimpleNamespace(is_extend=lambda: is_extend)
        batch = SimpleNamespace(forward_mode=mode, prefix_lens=before, extend_lens=new)
        return self._hooks[f"{SCHEDULER}.run_batch"](lambda *_: object(), None, batch)

    def end(self, result: object, took_s: float) -> None:
        def process(*_: Any) -> str:
            self.now_s += took_s
            return "processed"

        hook = self._hooks[f"{SCHEDULER}.process_batch_result"]
        assert hook(process, None, None, result) == "processed"


def test_step_is_told_of_with_what_it_computed() -> None:
    steps = Steps()
    steps.listen()
    steps.end(steps.begin([100, 0], [50, 50]), 2.0)
    assert steps.seen == [(50, 100, 2.0)]


def test_steps_that_overlap_begin_when_the_one_before_has_ended() -> None:
    steps = Steps()
    steps.listen()
    first = steps.begin([0], [64])
    second = steps.begin([64], [64])
    steps.end(first, 3.0)
    steps.end(second, 1.0)
    assert steps.seen == [(0, 64, 3.0), (64, 64, 1.0)]


def test_decoding_counts_for_when_the_next_step_began_only() -> None:
    steps = Steps()
    steps.listen()
    decode = steps.begin([], [], is_extend=False)
    prefill = steps.begin([0], [64])
    steps.end(decode, 5.0)
    steps.end(prefill, 1.0)
    assert steps.seen == [(0, 64, 1.0)]


def test_nothing_is_kept_while_nobody_listens() -> None:
    steps = Steps()
    result = steps.begin([0], [64])
    steps.listen()
    steps.end(result, 1.0)
    assert steps.seen == []
    steps.watch.step_listeners.clear()
    steps.end(steps.begin([0], [64]), 1.0)
    assert steps.seen == []


def test_steps_that_never_end_are_forgotten() -> None:
    steps = Steps()
    steps.listen()
    results = [steps.begin([0], [64]) for _ in range(20)]
    steps.end(results[0], 1.0)
    assert steps.seen == []
    steps.end(results[-1], 1.0)
    assert len(steps.seen) == 1
