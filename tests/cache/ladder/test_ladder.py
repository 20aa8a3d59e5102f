"""The ladder rejects an index of other tiers."""

from __future__ import annotations

import pytest

from kvtier.cache.ladder import Ladder, LadderOptions
from kvtier.cache.transfer.ranks import RankMover
from kvtier.core.errors import UsageError
from kvtier.core.types import DISK, HOST
from kvtier.index import make_key_index
from kvtier.index.policies.replayed import LRU
from kvtier.tiers import DistantAllocator


def test_an_index_of_other_tiers_is_refused() -> None:
    index = make_key_index({HOST: LRU, DISK: LRU}, lambda: b"")
    mover = RankMover({}, 1, 1, 1, 0.0, lambda: 0.0)
    with pytest.raises(UsageError, match="host, disk, and the ladder has host;"):
        Ladder(index, {HOST: DistantAllocator(4)}, mover, LadderOptions(1), clock=lambda: 0.0)
