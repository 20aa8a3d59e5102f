"""Prefill cost from an engine's steps, whose ends are reported later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Observe = Callable[[int, int, float], object]
"""Told of tokens before, tokens computed, and seconds: ``CostModel.observe_prefill``, or who passes
it on."""
MIN_STEP_TOKENS = 32
"""A step that computes fewer tokens says little about prefill."""


class StepClock:
    """Tells ``observe`` what steps take. Time is an argument."""

    def __init__(self, observe: Observe) -> None:
        self._observe = observe
        self._steps: dict[int, tuple[float, int, int]] = {}
        self._num_steps = 0
        self._last_end_s = 0.0

    def begin(self, now_s: float, pieces: Sequence[tuple[int, int]]) -> int | None:
        """The engine is about to compute.

        pieces: per prompt the tokens before, and those to compute. A number, if it should be told
        when this step has ended.
        """
        num_tokens = sum(num for _, num in pieces)
        if num_tokens < MIN_STEP_TOKENS:
            return None
        self._num_steps += 1
        num_before = sum(before * num for before, num in pieces) // num_tokens
        self._steps[self._num_steps] = (now_s, num_before, num_tokens)
        return self._num_steps

    def end(self, step: int, now_s: float) -> None:
        """A step has ended. Of two that overlap the second one began when the first had ended."""
        began = self._steps.pop(step, None)
        if began is not None:
            start_s, num_before, num_tokens = began
            took_s = now_s - max(start_s, self._last_end_s)
            self._observe(num_before, num_tokens, took_s)
        self._last_end_s = now_s
