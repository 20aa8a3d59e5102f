"""Membership of slabs in a set, and detection of slabs that were left behind.

Every opening and every closing of a set takes two steps. A step is written to the superblocks of
all slabs before the next step begins in any of them:

     opened:   step n + 1, then n + 2      closed in order:   n + 3, then n + 4

So after a crash two slabs are at most one step apart, and blocks are only written while all slabs
are at the second step of an opening. A slab that is further behind was restored from a backup, or
was missing when the others were used.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.core.errors import ConfigError
from kvtier.tiers.disk.format.records import SequenceNumbers
from kvtier.tiers.disk.format.superblock import SET_ID_BYTES, Membership, Superblock
from kvtier.tiers.disk.slab import Slab

NUMBERS_PER_STEP: Final = 1 << 32
"""Sequence numbers jump to a new range with every step, so that the numbers of records that a crash
lost are not reused."""
_NUM_STEPS: Final = 1 << 30
START_EMPTY: Final = "to start empty, delete all directories of the set"


def check_members(found: Sequence[tuple[Path, Superblock | None]]) -> None:
    """Check that slabs belong together, before anything is changed.

    found: folder and superblock of each slab; None if there is no slab yet.

    Raises ``ConfigError`` if a slab is missing, belongs to another set, or was left behind.
    """
    there = [(folder, each) for folder, each in found if each is not None]
    if not there:
        return
    newest_in, newest = max(there, key=lambda each: each[1].member.step)
    missing = [folder for folder, each in found if each is None]
    # Before the first opening is complete there are no blocks that could get lost.
    is_in_use = any(each.member.step for _, each in there)
    if missing and is_in_use:
        raise ConfigError(
            f"disk tier: {missing[0]} holds no slab, but {newest_in} has parts of blocks whose "
            f"other parts belong there; mount the missing disk, or {START_EMPTY}"
        )
    for folder, each in there:
        ours, newest_one = each.member, newest.member
        if ours.set_id != newest_one.set_id:
            raise ConfigError(
                f"disk tier: {folder} belongs to another set ({ours.set_id.hex()}) than "
                f"{newest_in} ({newest_one.set_id.hex()}); name directories that belong together, "
                "or delete those that should be empty"
            )
        if not _fits(ours, newest_one):
            raise ConfigError(
                f"disk tier: {folder} is at another step of its set than {newest_in} "
                f"({ours.step}, {newest_one.step} there): it was restored, or the others were used "
                f"without it; restore directories that belong together, or {START_EMPTY}"
            )


def _fits(ours: Membership, newest: Membership) -> bool:
    """Return whether an owner, or a crash, can have left the slabs in these states."""
    if ours.step == newest.step:
        return (ours.session, ours.set_id) == (newest.session, newest.set_id)
    return ours.step + 1 == newest.step and ours.session in (newest.session, newest.previous)


def set_id_of(found: Sequence[Superblock | None]) -> bytes:
    """Return the id of the slabs' set; a new one if they have none."""
    known = (each.member.set_id for each in found if each is not None)
    return next(known, secrets.token_bytes(SET_ID_BYTES))


def enter(slabs: Sequence[Slab], set_id: bytes) -> None:
    """Open a set that passed ``check_members``. Blocks may be written afterwards."""
    newest = max((slab.superblock.member for slab in slabs), key=lambda each: each.step)
    for slab in slabs:  # slabs that a crash left behind catch up first
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
    numbers = SequenceNumbers(max(first, *(slab.numbers.next for slab in slabs)))
    for slab in slabs:
        slab.numbers = numbers


def leave(slabs: Sequence[Slab]) -> None:
    """Mark a set as closed in order, if possible. The slabs still have to be closed."""
    left = _next(slabs[0].superblock.member)
    are_settled = [slab.settle(left) for slab in slabs]
    if len(slabs) > 1 and all(are_settled):
        for slab in slabs:
            slab.advance(_next(left))


def _next(member: Membership) -> Membership:
    return dataclasses.replace(member, step=member.step + 1)
