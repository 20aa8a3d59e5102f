"""Host memory and a disk below it, both full: what is found in either, and what is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from benchmarks.policies.tiers import TierReplay
from benchmarks.policies.traces import Keys, Trace
from benchmarks.report.targets import judged
from kvtier.index.policies.replayed import PolicyReplay
from kvtier.tools.report.stats import exactly

PAIRS = {
    "conversation": (0.01, 0.1),
    "agentic, 200 sessions": (0.01, 0.05),
    "agentic, all sessions": (0.005, 0.02),
}
"""Host memory and disk, of a trace's unique blocks."""
ALONE, TIERS = WAYS = "each alone", "tiers"


class BesideReplay:
    """Two policies, one for each tier, both told of all requests.

    What is possible where neither depends on the other. The interface is that of ``TierReplay``.
    """

    def __init__(self, policy: str, host_blocks: int, disk_blocks: int) -> None:
        self._host, self._disk = (PolicyReplay(policy, n) for n in (host_blocks, disk_blocks))
        self.num_from_host = 0

    def request(self, keys: Keys, now_s: float) -> int:
        from_host = self._host.request(keys, now_s)
        self.num_from_host += from_host
        return max(from_host, self._disk.request(keys, now_s))

    @property
    def num_in_host(self) -> int:
        return self._host.num_stored

    @property
    def num_stored(self) -> int:
        return self._disk.num_stored

    def check_invariants(self) -> None:
        self._host.check_invariants()
        self._disk.check_invariants()


@dataclass(frozen=True, slots=True)
class PairRow:
    """One policy in both tiers.

    Shares are of the trace's unique blocks, all else of the blocks that were asked for. through:
    index and ladder, or two policies alone.
    """

    trace: str
    seed: int | None
    through: str
    policy: str
    host_share: float
    disk_share: float
    hit_ratio: float
    from_host: float
    to_host: float
    to_disk: float


def measure_pair(
    trace: Trace, seed: int | None, policy: str, through: str, shares: tuple[float, float]
) -> PairRow:
    """A whole trace, from empty tiers on."""
    host, disk = (max(1, int(share * trace.num_unique)) for share in shares)
    make = TierReplay if through == TIERS else BesideReplay
    replay = make(policy, host, disk)
    requests = zip(trace.chains, trace.times, strict=True)
    num_hits = sum(replay.request(chain, at) for chain, at in requests)
    replay.check_invariants()
    counts = num_hits, replay.num_from_host, replay.num_in_host, replay.num_stored
    return PairRow(
        trace.name, seed, through, policy, *shares, *(num / trace.num_refs for num in counts)
    )


def pair_tables(rows: list[PairRow]) -> Iterator[Table]:
    """One for each trace and pair of sizes."""
    kinds = [(row.trace, row.seed, row.host_share, row.disk_share) for row in rows]
    for kind in dict.fromkeys(kinds):
        trace, seed, host_share, disk_share = kind
        beginnings = "" if seed is None else f" ({seed})"
        shares = f"host {100 * host_share:g} %, disk {100 * disk_share:g} %"
        table = Table(title=f"{trace}{beginnings}: {shares}; % of blocks")
        for column in ("through", "policy"):
            table.add_column(column)
        for column in ("hits", "from host", "to host", "to disk", "hits per write"):
            table.add_column(column, justify="right")
        for row, its in zip(rows, kinds, strict=True):
            if its == kind:
                cells = (row.hit_ratio, row.from_host, row.to_host, row.to_disk)
                table.add_row(
                    row.through,
                    row.policy,
                    *(f"{100 * cell:.2f}" for cell in cells),
                    f"{row.hit_ratio / row.to_disk:.3f}",
                )
        yield table


def pair_targets(rows: list[PairRow]) -> list[dict[str, object]]:
    """Return per pair of sizes hits against LRU, hits from host memory, and bytes written.

    Hits are compared with LRU's in the same tiers, those from host memory with the policy's there
    alone, bytes written with LRU's.
    """
    found = {(row.trace, row.seed, row.through, row.policy): row for row in rows}
    judgements = []
    for (trace, seed, through, policy), row in found.items():
        lru = found.get((trace, seed, TIERS, "lru"))
        alone = found.get((trace, seed, ALONE, policy))
        if through != TIERS or policy != "runs" or lru is None or alone is None:
            continue
        wanted = {
            "hits, points above LRU": (100 * (row.hit_ratio - lru.hit_ratio), 0.0, True),
            "from host, points below alone": (100 * (alone.from_host - row.from_host), 1.0, False),
            "written, of LRU's": (row.to_disk / lru.to_disk, 0.75, False),
        }
        for name, (value, target, at_least) in wanted.items():
            column = f"{trace}: {name}"
            judgements.append(
                judged("P", exactly(value), target, at_least=at_least, digits=2, column=column)
            )
    return judgements
