"""The benchmark of requests that wait, over a small cache."""

from __future__ import annotations

from benchmarks.scale.vllm_worker import waiting


def test_a_step_in_which_requests_wait_runs_again_and_again() -> None:
    step = waiting(1000)
    for _ in range(3):
        step()
