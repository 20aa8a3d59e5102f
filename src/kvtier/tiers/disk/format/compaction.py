"""A journal that is written anew, a slice at a time, while the old one goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.tiers.disk.format.journal import Journal
from kvtier.tiers.disk.format.records import (
    RecordKind,
    Records,
    are_live,
    are_valid,
    blank,
    header,
    pick,
    seal,
)
from kvtier.tiers.disk.format.rows import SlotRows

SLICE_RECORDS: Final = 1 << 14
"""Records of the old journal that are read and compared at once: 1 MiB."""

Bools = npt.NDArray[np.bool_]


class Compaction:
    """Copies from the old journal.

    Of what it had when this began, the records that decide about a slot; of what is appended
    meanwhile, all. So the new one says the same.

        old   [ before: what decides is copied ][ since: all of it is copied ]<- appends
        fresh [ header ][ copied ... ][ names of namespaces ]

    old: is only appended to meanwhile; what it has when this begins has come into rows. fresh:
    empty. rows: what decides. slab_id, generation: for the header.
    """

    def __init__(
        self,
        old: Journal,
        fresh: Journal,
        rows: SlotRows,
        slab_id: bytes,
        generation: int,
    ) -> None:
        self.fresh = fresh
        self.generation = generation
        self.is_used: Bools = np.zeros(1 << 16, bool)
        self._old = old
        self._rows = rows
        self._at = 0
        self._before = old.num_records
        self._is_copied: Bools = np.zeros(len(rows), bool)
        self._is_named: Bools = np.zeros(1 << 16, bool)
        first = header(slab_id, generation)
        seal(first)
        fresh.append(first)

    @property
    def num_left(self) -> int:
        """Records of the old journal that were not looked at yet."""
        return self._old.num_records - self._at

    def copy(self, num_records: int) -> None:
        """Go on with about ``num_records`` records of the old journal.

        ``OSError`` where the new one can't be written, or where what was appended meanwhile can't
        be read.
        """
        end = self._at + min(num_records, self.num_left)
        while self._at < end:
            if self._at < self._before:
                self._at = min(self._old.skip_hole(self._at), self._before)
                end = min(max(end, self._at), self._old.num_records)
            to = min(self._at + SLICE_RECORDS, end)
            to = min(to, self._before) if self._at < self._before else to
            self._copy(to)

    def _copy(self, to: int) -> None:
        """One slice, up to record number ``to``: all of it from before, or from since."""
        is_before = self._at < self._before
        try:
            records = self._old.read(self._at, to)
        except OSError:
            if not is_before:
                raise
            records = blank(0, RecordKind.PUT)  # ``missing`` knows what was lost
        valid = are_valid(records)
        if not is_before and (len(records) < to - self._at or not valid.all()):
            raise OSError(f"records {self._at} to {to} of the journal can't be read back")
        kept = self._deciding(pick(records, np.flatnonzero(valid))) if is_before else records
        if len(kept):
            self.fresh.append(kept)
        self._note(kept)
        self._at = to

    def _deciding(self, records: Records) -> Records:
        """Those that are about a block or a bad slot, and decide."""
        is_about = are_live(records["kind"]) & (records["slot"] < len(self._rows))
        records = pick(records, np.flatnonzero(is_about))
        # Without the lock of look-ups: a row that is changed meanwhile, and be it half old, half
        # new, is that of a record which is appended, and copied later. This one may go or stay.
        return pick(records, np.flatnonzero(self._rows.decide(records)))

    def _note(self, kept: Records) -> None:
        about = kept[are_live(kept["kind"])]
        self._is_copied[about["slot"]] = True
        self.is_used[about["namespace"]] = True

    # -- the end: nothing is appended to the old one while these are called ------------------------

    def missing(self) -> Records:
        """Records that decide, and could not be read back, as far as they are known.

        Newly sealed, without their depth, their time and their namespace.
        """
        lost = []
        for start in range(0, len(self._rows), SLICE_RECORDS):
            part = slice(start, start + SLICE_RECORDS)
            is_lost = are_live(self._rows.kinds[part]) & ~self._is_copied[part]
            lost.append(start + np.flatnonzero(is_lost))
        records = self._rows.of(np.concatenate(lost))
        seal(records)
        return records

    def name(self, numbers: Mapping[bytes, int]) -> None:
        """Write which digests the numbers stand for that were copied. numbers: by digest."""
        new = {
            digest: number
            for digest, number in numbers.items()
            if self.is_used[number] and not self._is_named[number]
        }
        naming = blank(len(new), RecordKind.NAMESPACE)
        naming["namespace"] = list(new.values())
        for record, digest in zip(naming, new, strict=True):
            record["key"] = digest
        seal(naming)
        if len(naming):
            self.fresh.append(naming)
            self._is_named[naming["namespace"]] = True
