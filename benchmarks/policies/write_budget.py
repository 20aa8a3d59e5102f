"""Host memory and a disk that may be written less than it would be: what is found all the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from benchmarks.policies.tiers import BLOCK_BYTES, TierReplay
from benchmarks.policies.traces import Trace
from benchmarks.report.targets import judged
from kvtier.tools.report.stats import exactly

BUCKET = 1 / 24
"""As the disk's budget has it: of a day's, an hour's may be saved up."""
TIERS, FIRST_COME = BUDGETED = "tiers", "first come"
POLICY = "runs"


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit of writes.

    share: of the ``num_written`` blocks without a limit, over the whole trace. bucket: the part of
    it that is saved up at most, and is there at first.
    """

    share: float
    bucket: float
    num_written: int


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """Hits under one write budget.

    Shares of tiers are of the trace's unique blocks, those of hits of the requested blocks. budget,
    bucket: see ``Limit``; None for none. through: as kvtier's tiers are, or first come, first
    written. A block is one MiB.
    """

    trace: str
    seed: int | None
    through: str
    host_share: float
    disk_share: float
    budget: float | None
    bucket: float | None
    hit_ratio: float
    from_host: float
    from_disk: float
    num_written: int
    bytes_written: int


def measure_budget(
    trace: Trace,
    seed: int | None,
    through: str,
    shares: tuple[float, float],
    limit: Limit | None = None,
) -> BudgetRow:
    """A whole trace, from empty tiers on."""
    host, disk = (max(1, int(share * trace.num_unique)) for share in shares)
    if limit is None:
        replay = TierReplay(POLICY, host, disk)
    else:
        lasts_s = trace.times[-1] - trace.times[0]
        days = BUCKET / limit.bucket  # that the trace takes
        num_blocks = limit.share * limit.num_written / days
        replay = TierReplay(
            POLICY,
            host,
            disk,
            max(1, int(num_blocks * BLOCK_BYTES)),
            day_s=lasts_s / days,
            is_first_come=through == FIRST_COME,
        )
    requests = zip(trace.chains, trace.times, strict=True)
    num_hits = sum(replay.request(chain, at) for chain, at in requests)
    replay.check_invariants()
    return BudgetRow(
        trace.name,
        seed,
        through,
        *shares,
        limit and limit.share,
        limit and limit.bucket,
        num_hits / trace.num_refs,
        replay.num_from_host / trace.num_refs,
        (num_hits - replay.num_from_host) / trace.num_refs,
        replay.num_stored,
        replay.num_stored * BLOCK_BYTES,
    )


def _without(rows: list[BudgetRow], row: BudgetRow) -> BudgetRow:
    """The same without a limit."""
    return next(
        each
        for each in rows
        if each.budget is None and (each.trace, each.seed) == (row.trace, row.seed)
    )


def budget_tables(rows: list[BudgetRow]) -> Iterator[Table]:
    """One for each trace."""
    for free in (row for row in rows if row.budget is None):
        beginnings = "" if free.seed is None else f" ({free.seed})"
        shares = f"host {100 * free.host_share:g} %, disk {100 * free.disk_share:g} %"
        table = Table(title=f"{free.trace}{beginnings}: {shares}; % of blocks")
        for column in ("may be written, of what would be", "who is"):
            table.add_column(column)
        for column in ("hits", "lost", "from host", "from disk", "written", "of what would be"):
            table.add_column(column, justify="right")
        for row in rows:
            if _without(rows, row) is free:
                cells = (row.hit_ratio, free.hit_ratio - row.hit_ratio, row.from_host)
                cells += (row.from_disk,)
                table.add_row(
                    "all" if row.budget is None else f"{100 * row.budget:g} %",
                    row.through,
                    *(f"{100 * cell:.2f}" for cell in cells),
                    f"{row.bytes_written / 2**30:.1f} GiB",
                    f"{row.num_written / free.num_written:.3f}",
                )
        yield table


def budget_targets(rows: list[BudgetRow]) -> list[dict[str, object]]:
    """Return per budget the hits, against those of writing first come, first served."""
    found = {(row.trace, row.seed, row.budget, row.through): row for row in rows}
    judgements = []
    for (trace, seed, budget, through), row in found.items():
        other = found.get((trace, seed, budget, FIRST_COME))
        if through == TIERS and budget is not None and other is not None:
            value = exactly(100 * (row.hit_ratio - other.hit_ratio))
            column = f"{trace}, {100 * budget:g} % of writes: hits, points above first come"
            judgements.append(judged("P", value, 0.0, at_least=True, digits=2, column=column))
    return judgements
