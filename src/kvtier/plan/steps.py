"""Prefill cost from an engine's steps, whose ends are reported later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Observe = Callable[[int, int, float], object]
"""Receives tokens before, tokens computed, and seconds, as ``CostModel.observe_prefill`` does."""
MIN_STEP_TOKENS = 32
"""A step that computes fewer tokens says little about prefill."""


class StepClock:
    """Measures an engine's steps and passes their times to ``observe``. Time is an argument."""

    def __init__(self, observe: Observe) -> None:
        self._observe = observe
        self._steps: dict[int, tuple[float, int, int]] = {}
        self._num_steps = 0
        self._last_end_s = 0.0

    @property
    def last(self) -> int:
        """Number of the last step that has begun; 0 before the first."""
        return self._num_steps

    def begin(self, now_s: float, pieces: Sequence[tuple[int, int]]) -> int | None:
        """Record that the engine begins a step.

        pieces: per prompt, the tokens before and the tokens to compute.
        Returns a number for ``end``, or None if the end of this step is not needed.
        """
        num_tokens = sum(num for _, num in pieces)
        if num_tokens < MIN_STEP_TOKENS:
            return None
        self._num_steps += 1
        num_before = sum(before * num for before, num in pieces) // num_tokens
        self._steps[self._num_steps] = (now_s, num_before, num_tokens)
        return self._num_steps

    def end(self, step: int, now_s: float) -> None:
        """Record the end of a step. Overlapping steps are counted one after the other."""
        began = self._steps.pop(step, None)
        if began is not None:
            start_s, num_before, num_tokens = began
            took_s = now_s - max(start_s, self._last_end_s)
            self._observe(num_before, num_tokens, took_s)
        self._last_end_s = now_s
