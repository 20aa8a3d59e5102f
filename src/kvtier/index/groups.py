"""Groups of layers in the index: what each needs of a prompt, and the columns that they make."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvtier.errors import ConfigError, LayoutError
from kvtier.layout import Attention, KVGroup
from kvtier.types import AnyColumn, column_of


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """Blocks of one group that a cut needs: its last ``num_last`` blocks, None for all.

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
        """Whether a block is of no use without those in front of it. Then leaves leave first."""
        return self.num_last is None

    def num_needed(self, cut: int) -> int:
        """Return how many of the last blocks before ``cut`` it needs."""
        return cut if self.num_last is None else min(cut, self.num_last)

    def needed(self, cut: int) -> range:
        """Positions of the blocks that a cut after ``cut`` blocks needs."""
        return range(cut - self.num_needed(cut), cut)

    @staticmethod
    def of(group: KVGroup) -> ReuseRule:
        """The rule of a group, by its kind of attention.

        The next token sees itself and the ``window - 1`` tokens before it, so these have to be in
        whole blocks in front of the cut: ceil((window - 1) / block_size).
        """
        if group.attention is Attention.SLIDING:
            return ReuseRule(-(-(group.window - 1) // group.block_size))
        return ReuseRule(1) if group.attention is Attention.RECURRENT else ALL


ALL = ReuseRule()


def columns_of(
    given: Collection[AnyColumn], num_groups: int
) -> tuple[tuple[str, ...], tuple[AnyColumn, ...]]:
    """The tiers, in the order given, and all columns.

    The first group's of every tier, by the tier's name, then the second group's, and so on.

    ConfigError where ``given`` has other columns than these, or where there is no group.
    """
    tiers = tuple(column for column in given if isinstance(column, str))
    columns = tuple(column_of(tier, group) for group in range(num_groups) for tier in tiers)
    if num_groups < 1 or set(columns) != set(given):
        raise ConfigError(
            f"{num_groups} groups in the tiers {tiers} need a policy for each of {columns}, and for"
            f" no other column; got {list(given)}"
        )
    return tiers, columns
