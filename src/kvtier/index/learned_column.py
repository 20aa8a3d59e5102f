"""A column of the flat index in Python where a policy decides that knows requests: the twin of
``native/keys/learned_column.hpp``, which says what a place is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier._reference.live import LIVE, Live
from kvtier._reference.runs import Block
from kvtier.index.known_blocks import KnownBlock, KnownBlocks
from kvtier.index.policies.runs import SEED, USUAL_ROOM
from kvtier.types import BlockId

FIT_SHARE = 16


@dataclass(slots=True)
class _Place:
    """block: the policy's. members: those that are here."""

    block: Block
    members: dict[BlockId, KnownBlock] = field(default_factory=dict)


class LearnedColumn:
    """position: of the column, in ``known``. policy: one of ``LIVE``."""

    def __init__(self, known: KnownBlocks, position: int, policy: str) -> None:
        self.live: Live = LIVE[policy](USUAL_ROOM, SEED, self._may_leave, self.named)
        self._known = known
        self._position = position
        self._places: dict[int, _Place] = {}
        self._num_members = 0
        self._room = self._told = USUAL_ROOM

    def _may_leave(self, block: Block, num_gone: int) -> bool:
        members = self._places[block.key].members.values()
        return all(each.residencies[self._position].evictable for each in members)

    def named(self, name: int) -> Block | None:
        """The policy's block of the place with this name, None where nothing of it is here."""
        place = self._places.get(name)
        return None if place is None else place.block

    @property
    def blocks(self) -> set[BlockId]:
        return {block for place in self._places.values() for block in place.members}

    def in_front_of(self, known: KnownBlock) -> int | None:
        """The name of the place in front of a block's, None where one of them is not here."""
        place = self._places.get(known.name)
        if place is None or known.block not in place.members or place.block.parent is None:
            return None
        parent = place.block.parent
        return parent.key if parent.item >= 0 else None

    # -- blocks -----------------------------------------------------------------------------------

    def enter(self, known: KnownBlock, behind: Block | None) -> None:
        place = self._places.get(known.name)
        if place is None:
            block = self.live.entered(known.name, known.block, None, behind)
            place = self._places[known.name] = _Place(block)
        place.members[known.block] = known
        self._num_members += 1

    def let_go(self, known: KnownBlock) -> None:
        self.live.let_go(self._places[known.name].block)

    def evict(self) -> list[BlockId]:
        """The blocks of the place that leaves next; none where none may."""
        left = self.live.next_victim()
        if left is None:
            return []
        members = self._places.pop(left.key).members
        self._num_members -= len(members)
        return sorted(members, key=lambda block: block & 0xFFFFFFFF)

    def leave(self, known: KnownBlock) -> None:
        """A block is gone, which may have been evicted before."""
        place = self._places.get(known.name)
        if place is None or place.members.pop(known.block, None) is None:
            return
        self._num_members -= 1
        if place.members:
            self.live.let_go(place.block)
        else:
            del self._places[known.name]
            self.live.left(place.block)

    # -- numbers of blocks, and of places ----------------------------------------------------------

    def set_room(self, num_blocks: int) -> None:
        self._room, self._told = num_blocks, 0
        self._fit()

    def _fit(self) -> None:
        room = max(1, _in_proportion(self._room, self.live.num_blocks, self._num_members))
        if self._told == 0 or abs(room - self._told) > self._told // FIT_SHARE:
            self._told = room
            self.live.set_capacity(room)

    def asked(self, path: Sequence[int], found: Sequence[Block], now: float) -> None:
        if self._known.has_groups:
            self._fit()
        self.live.asked(path, found, now)

    def admit(self, names: Sequence[int], num_free: int, least_chance: float) -> list[int]:
        if not self._known.has_groups:
            return self.live.admit(names, num_free, least_chance)
        new = [name for name in names if name not in self._places]
        places = list(dict.fromkeys(new))
        num_free = max(0, num_free - (len(names) - len(new)))
        num_free = _in_proportion(num_free, len(places), len(new))
        let_in = {places[at] for at in self.live.admit(places, num_free, least_chance)}
        return [at for at, name in enumerate(names) if name in self._places or name in let_in]

    def check_invariants(self) -> None:
        assert self._num_members == len(self.blocks), "a block is lost"
        assert len(self._places) == self.live.num_blocks, "a place is lost"
        for name, place in self._places.items():
            assert place.members, "a place of nothing"
            assert place.block.key == name, "a place is another's"
            for block, known in place.members.items():
                assert self._known[block] is known, "a block is gone"
                assert known.name == name, "a block of another place"
        self.live.check_invariants()


def _in_proportion(num_blocks: int, part: int, whole: int) -> int:
    return num_blocks * part // whole if whole else num_blocks
