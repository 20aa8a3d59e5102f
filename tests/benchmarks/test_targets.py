"""Figures against targets, as small as possible."""

from __future__ import annotations

import pytest

from benchmarks.report.targets import judged
from kvtier.tools.report.stats import Estimate


@pytest.mark.parametrize(
    ("found", "met"),
    [
        (Estimate(4e-6, 3e-6, 5e-6), True),
        (Estimate(7e-6, 6e-6, 8e-6), False),
        (Estimate(5e-6, 4e-6, 6e-6), None),
    ],
)
def test_microseconds_are_judged_with_the_digits_that_are_printed(
    found: Estimate, met: bool | None
) -> None:
    assert judged("N2", found, 5e-6, at_least=False, digits=9)["met"] is met


def test_few_printed_digits_hide_no_miss() -> None:
    assert judged("P", Estimate(8.04, 8.04, 8.04), 8.05, at_least=True, digits=1)["met"] is False
