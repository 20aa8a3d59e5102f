"""Incremental compaction: copies a journal slice by slice while the old one is appended to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from kvtier.tiers.disk.arrays import Bools
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
"""Number of records of the old journal that are read and compared at once: 1 MiB."""


class Compaction:
    """A running compaction of a journal.

    Of the records that the old journal had at the start, only deciding ones are copied. Records
    that are appended meanwhile are all copied. So both journals describe the same state.

        old   [ before: deciding records are copied ][ since: all are copied ]<- appends
        fresh [ header ][ copied ... ][ names of namespaces ]

    Args:
        old: the old journal. It may be appended to meanwhile, but not changed otherwise. ``rows``
            reflects all records that it has at the start.
        fresh: the new journal, empty.
        rows: deciding records.
        slab_id: id of the slab, for the header.
        generation: generation of the new journal, for the header.
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
        """Number of records of the old journal that were not processed yet."""
        return self._old.num_records - self._at

    def copy(self, num_records: int) -> None:
        """Process about ``num_records`` further records of the old journal.

        Raises ``OSError`` if the new journal can't be written, or if records that were appended
        meanwhile can't be read.
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
        """Copy one slice, up to record number ``to``, entirely from before or since the start."""
        is_before = self._at < self._before
        try:
            records = self._old.read(self._at, to)
        except OSError:
            if not is_before:
                raise
            records = blank(0, RecordKind.PUT)  # ``missing`` finds the lost ones
        valid = are_valid(records)
        if not is_before and (len(records) < to - self._at or not valid.all()):
            raise OSError(f"records {self._at} to {to} of the journal can't be read back")
        kept = self._deciding(pick(records, np.flatnonzero(valid))) if is_before else records
        if len(kept):
            self.fresh.append(kept)
        self._note(kept)
        self._at = to

    def _deciding(self, records: Records) -> Records:
        """Return the deciding records of blocks and bad slots."""
        is_about = are_live(records["kind"]) & (records["slot"] < len(self._rows))
        records = pick(records, np.flatnonzero(is_about))
        # The table is read without its lock. If a row changes meanwhile, even if it is seen half
        # old and half new, its new record is appended and copied later, so either result is right.
        return pick(records, np.flatnonzero(self._rows.decide(records)))

    def _note(self, kept: Records) -> None:
        about = kept[are_live(kept["kind"])]
        self._is_copied[about["slot"]] = True
        self.is_used[about["namespace"]] = True

    # -- the end: nothing is appended to the old journal during these calls ------------------------

    def missing(self) -> Records:
        """Return the deciding records that could not be read back, rebuilt from ``rows``.

        They are sealed again, without depth, time and namespace.
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
        """Append the digests of all namespace numbers in use. numbers: number by digest."""
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
