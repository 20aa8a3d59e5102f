"""Rows of the benchmark of an agent's pauses, and sizes of its servers."""

from __future__ import annotations

import argparse

from benchmarks.server.agent_pauses import HINTS, Measurement, contestants

OPTIONS = argparse.Namespace(sessions=9, turns=3, rounds=6, disk_bytes_per_s=1)


def test_host_memory_holds_a_third_of_the_sessions_except_for_the_endless_one() -> None:
    sizes = {made.name: int(str(made.below["--host-capacity"])) for made in contestants(OPTIONS)}
    assert sizes.keys() == HINTS.keys()
    endless = sizes.pop("endless host")
    assert len(set(sizes.values())) == 1
    assert endless == 12 * sizes["none"]


def test_ratios_are_taken_within_a_round() -> None:
    one = Measurement()
    one.ttft_ms = {
        "prefetch": [[20.0 * (1 + number)] * 5 for number in range(6)],
        "endless host": [[10.0 * (1 + number)] * 5 for number in range(6)],
    }
    text = 'kvtier_hit_blocks_total{tier="disk"} 2.0\n'
    text += 'kvtier_hints_total{action="prefetch",outcome="used"} 9.0\n'
    row = one.row("prefetch", text)
    assert row.of_endless == 2.0
    assert row.interval_95 == (2.0, 2.0)
    assert (row.mean_ttft_ms, row.p90_ttft_ms) == (70.0, 120.0)
    assert (row.hit_blocks, row.outcomes) == ({"disk": 2.0}, {"used": 9.0})
