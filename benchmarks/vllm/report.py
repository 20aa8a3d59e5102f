"""Report of measurements under vLLM, against its targets."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.engines.report import (
    Results,
    Row,
    changed,
    common_targets,
    judged_row,
    measured_rows,
    new_prompt_rows,
    summary_rows,
)
from benchmarks.vllm.servers import ENDLESS, ON_DISK, OURS, OWN_FRONT, VLLM

TTFT_SAVED = -0.5
TO_ENDLESS = {OURS: 1.05, OWN_FRONT: 1.05, ON_DISK: 1.1}
"""Largest time to first token, as a multiple of that of a pool that never evicts."""


def targets(turns: Sequence[Row]) -> list[Row]:
    """Return T4 and T4'.

    T4 is the change of the time to first token, T4' its ratio to that of an endless pool.
    """
    found = []
    for row in turns:
        if row["contestant"] in TO_ENDLESS and "ttft_to_endless" in row:
            most, to_endless = TO_ENDLESS[str(row["contestant"])], row["ttft_to_endless"]
            found.append(
                {
                    "id": "T4'",
                    "contestant": row["contestant"],
                    **judged_row(changed(to_endless, lambda ratio: ratio), most),
                }
            )
        if "ttft_ratio" in row and row["contestant"] != ENDLESS:
            change = changed(row["ttft_ratio"], lambda ratio: ratio - 1)
            found.append(
                {"id": "T4", "contestant": row["contestant"], **judged_row(change, TTFT_SAVED)}
            )
    return found


def result_json(results: Results) -> dict[str, list[Row]]:
    """Return ``rows`` and ``targets`` of the result."""
    medians = summary_rows(results.runs, VLLM, {"endless": ENDLESS})
    new = [row for name, starts in results.new.items() for row in new_prompt_rows(name, starts)]
    return {
        "rows": measured_rows(results, medians, new),
        "targets": [*targets(medians), *common_targets(results, new)],
    }
