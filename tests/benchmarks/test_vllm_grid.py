"""Arithmetic of the benchmark of the grid under vLLM; its engines need vLLM."""

from __future__ import annotations

from benchmarks.vllm.grid import FIGURES, Samples, rows_of, table


def _samples(value: float) -> Samples:
    """Return figures of seven rounds, which rise from ``value``."""
    return {name: [value * (1 + number) for number in range(7)] for name in FIGURES}


def test_ratios_are_those_of_the_same_round() -> None:
    rows = rows_of({0: _samples(2), 512: _samples(3)})
    assert [row["grid"] for row in rows] == [0, 512]
    assert "hit_s_ratio" not in rows[0]
    assert rows[1]["hit_s"] == 12
    assert rows[1]["hit_s_ratio"] == 1.5
    assert rows[1]["hit_s_ratio_interval_95"] == [1.5, 1.5]
    assert table(rows).row_count == 2
