"""Groups of layers in the index: the blocks that each needs for a cut, and their columns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvtier.errors import ConfigError, LayoutError
from kvtier.layout import Attention, KVGroup
from kvtier.types import AnyColumn, column_of


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """Rule for the blocks of a group that a cut needs: the last ``num_last``, or all if None.

    all positions       [0 ......... cut)    full attention, latents
    the last W tokens         [..... cut)    sliding window
    the state at the cut           [ cut)    recurrent layers
    """

    num_last: int | None = None

    def __post_init__(self) -> None:
        if self.num_last is not None and self.num_last < 0:
            raise LayoutError(f"a rule needs 0 blocks or more, got {self.num_last}")

    @property
    def needs_all(self) -> bool:
        """Whether a block needs all blocks before it. Then leaves are evicted first."""
        return self.num_last is None

    def num_needed(self, cut: int) -> int:
        """Return how many of the last blocks before ``cut`` are needed."""
        return cut if self.num_last is None else min(cut, self.num_last)

    def needed(self, cut: int) -> range:
        """Return the positions of the blocks that a cut after ``cut`` blocks needs."""
        return range(cut - self.num_needed(cut), cut)

    @staticmethod
    def of(group: KVGroup) -> ReuseRule:
        """Return the rule of a group, from its kind of attention.

        With a sliding window, the next token attends to itself and the ``window - 1`` tokens before
        it. They take ceil((window - 1) / block_size) whole blocks before the cut.
        """
        if group.attention is Attention.SLIDING:
            return ReuseRule(-(-(group.window - 1) // group.block_size))
        return ReuseRule(1) if group.attention is Attention.RECURRENT else ALL


ALL = ReuseRule()


def columns_of(
    given: Collection[AnyColumn], num_groups: int
) -> tuple[tuple[str, ...], tuple[AnyColumn, ...]]:
    """Return the tiers, in the given order, and all columns.

    The columns of the first group come first, named by their tiers, then those of the second group,
    and so on.

    Raises ConfigError if ``given`` is not exactly the set of these columns, or there is no group.
    """
    tiers = tuple(column for column in given if isinstance(column, str))
    columns = tuple(column_of(tier, group) for group in range(num_groups) for tier in tiers)
    if num_groups < 1 or set(columns) != set(given):
        raise ConfigError(
            f"{num_groups} groups in the tiers {tiers} need a policy for each of {columns}, and for"
            f" no other column; got {list(given)}"
        )
    return tiers, columns
