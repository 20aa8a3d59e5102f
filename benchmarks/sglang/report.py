"""Report of measurements under SGLang, against its targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from benchmarks.sglang import second_pass
from benchmarks.sglang.second_pass import SecondPass
from benchmarks.sglang.servers import FILE, HICACHE, LINKER, OURS, SGLANG

WITH_KVTIER = (OURS, LINKER)
TTFT_SAVED = -0.5
BELOW_FILE = 1.0


def targets(turns: Sequence[Row]) -> list[Row]:
    """Return T4: the change of the time to first token against HiCache without storage.

    A second row has its ratio to HiCache with `file`.
    """
    found = []
    for row in turns:
        if row["contestant"] not in WITH_KVTIER:
            continue
        common = {"id": "T4", "contestant": row["contestant"]}
        if "ttft_ratio" in row:
            change = changed(row["ttft_ratio"], lambda ratio: ratio - 1)
            found.append({**common, "against": HICACHE, **judged_row(change, TTFT_SAVED)})
        if "ttft_to_file" in row:
            share = changed(row["ttft_to_file"], lambda ratio: ratio)
            found.append({**common, "against": FILE, **judged_row(share, BELOW_FILE)})
    return found


def result_json(results: Results, twice: Mapping[str, SecondPass]) -> dict[str, list[Row]]:
    """Return ``rows`` and ``targets`` of the result."""
    medians = summary_rows(results.runs, HICACHE, {"alone": SGLANG, "file": FILE})
    new = [row for name, starts in results.new.items() for row in new_prompt_rows(name, starts)]
    second = [row for name, each in twice.items() for row in second_pass.rows(name, each)]
    return {
        "rows": [*measured_rows(results, medians, new), *second],
        "targets": [
            *targets(medians),
            *second_pass.targets(second, WITH_KVTIER),
            *common_targets(results, new),
        ],
    }
