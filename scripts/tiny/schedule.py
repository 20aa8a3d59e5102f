"""Row length and learning rate during a run, by steps or by the clock."""

from __future__ import annotations

LENGTHS = (512, 2048, 4096)
WARMUP_STEPS = 40

# A run that continues from trained weights: the share of the time at which each length ends.
CONTINUED_ENDS = (0.80, 0.90, 1.0)
CONTINUED_PEAK = 0.7
CONTINUED_WARMUP_STEPS = 20


def scale_by_steps(step: int, phases: tuple[int, ...]) -> float:
    """Return the scale: warm-up, flat through the first phase, then linear to zero."""
    if step < phases[0]:
        return min(1.0, (step + 1) / WARMUP_STEPS)
    return 1.0 - (step - phases[0]) / (sum(phases) - phases[0])


def scale_by_clock(step: int, progress: float) -> float:
    """Return the scale: short warm-up to ``CONTINUED_PEAK``, then linear to zero.

    ``progress`` is the share of the time that has passed.
    """
    warm = min(1.0, (step + 1) / CONTINUED_WARMUP_STEPS)
    return CONTINUED_PEAK * warm * max(0.0, 1.0 - progress)
