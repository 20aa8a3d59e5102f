"""The slabs of one set: which belong together, and that none of them was left behind.

Every opening and every closing of a set are two steps, and the step is written to the superblock
of every slab before the next one begins in any:

     opened:   step n + 1, then n + 2      closed in order:   n + 3, then n + 4

So whatever a crash leaves, two slabs are at most one step apart, and blocks are only written while
all of them are at the second step of an opening. One that is further behind was restored, or was
not there when the others were used.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.tiers.disk.format.sequence import Sequence as Numbers
from kvtier.tiers.disk.format.superblock import NO_SET, SET_ID_BYTES, Membership, Superblock
from kvtier.tiers.disk.slab import Slab

NUMBERS_PER_STEP: Final = 1 << 32
"""Sequence numbers begin anew, higher, with every step: those of records that a crash lost are not
given out again."""
_NUM_STEPS: Final = 1 << 30
START_EMPTY: Final = "to start empty, delete all directories of the set"


def check_members(found: Sequence[tuple[Path, Superblock | None]]) -> None:
    """See that slabs belong together before anything is changed. None: there is no slab yet.

    Raises ``ConfigError`` where one is missing, is of another set, or was left behind.
    """
    there = [(folder, each) for folder, each in found if each is not None]
    if not there:
        return
    newest_in, newest = max(there, key=lambda each: each[1].member.step)
    missing = [folder for folder, each in found if each is None]
    # Before the first opening is complete there are no blocks that could get lost.
    is_in_use = any(each.member.set_id == NO_SET or each.member.step for _, each in there)
    if missing and is_in_use:
        raise ConfigError(
            f"disk tier: {missing[0]} holds no slab, but {newest_in} has a part of blocks whose "
            f"other parts are there; mount the disk that is missing, or {START_EMPTY}"
        )
    for folder, each in there:
        ours, newest_one = each.member, newest.member
        if ours.set_id != newest_one.set_id and ours != Membership():
            raise ConfigError(
                f"disk tier: {folder} is of another set ({ours.set_id.hex()}) than {newest_in} "
                f"({newest_one.set_id.hex()}); name directories that belong together, or delete "
                "those that shall be empty"
            )
        if not _fits(ours, newest_one):
            raise ConfigError(
                f"disk tier: {folder} is not of the same time as {newest_in} (step {ours.step} of "
                f"the set, {newest_one.step} there): it was restored, or the others were used "
                f"without it; put back what belongs together, or {START_EMPTY}"
            )


def _fits(ours: Membership, newest: Membership) -> bool:
    """The slabs may be what an owner, or the end of its process, left."""
    if ours.step == newest.step:
        return (ours.session, ours.set_id) == (newest.session, newest.set_id)
    return ours.step + 1 == newest.step and ours.session in (newest.session, newest.previous)


def set_id_of(found: Sequence[Superblock | None]) -> bytes:
    """The id of the set that the slabs are of; a new one where they have none."""
    known = (each.member.set_id for each in found if each is not None)
    return next((each for each in known if each != NO_SET), secrets.token_bytes(SET_ID_BYTES))


def enter(slabs: Sequence[Slab], set_id: bytes) -> None:
    """Open a set that ``check_members`` has seen: from now on, blocks may be written."""
    newest = max((slab.superblock.member for slab in slabs), key=lambda each: each.step)
    for slab in slabs:  # what a crash left behind catches up first
        if slab.superblock.member != newest:
            slab.mark_open(newest)
    session = secrets.randbelow((1 << 64) - 1) + 1
    entered = Membership(set_id, newest.step + 1, session, newest.session)
    for slab in slabs:
        slab.mark_open(entered)
    if len(slabs) > 1:
        entered = _next(entered)
        for slab in slabs:
            slab.mark_open(entered)
    first = entered.step % _NUM_STEPS * NUMBERS_PER_STEP
    numbers = Numbers(max(first, *(slab.numbers.next for slab in slabs)))
    for slab in slabs:
        slab.numbers = numbers


def leave(slabs: Sequence[Slab]) -> None:
    """Close a set in order, as far as that can be done. The slabs still have to be closed."""
    left = _next(slabs[0].superblock.member)
    are_settled = [slab.settle(left) for slab in slabs]
    if len(slabs) > 1 and all(are_settled):
        for slab in slabs:
            slab.advance(_next(left))


def _next(member: Membership) -> Membership:
    return dataclasses.replace(member, step=member.step + 1)
