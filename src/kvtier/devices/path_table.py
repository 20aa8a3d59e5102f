"""Measured copy paths: the fastest one by size and number of copies, saved in a file.

The files are in the user's cache folder, one per accelerator and its versions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import groupby
from math import log2
from pathlib import Path
from tempfile import NamedTemporaryFile

from kvtier.core.system.user_paths import cache_folder
from kvtier.devices.base import Direction, Finding
from kvtier.devices.paths import CopyPath

logger = logging.getLogger(__name__)

VERSION = 2
"""Format version of the file. If it differs, the paths are measured again."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Rate of ``num_copies`` scattered copies of ``copy_bytes`` each by one path.

    bytes_per_s: median of several runs, from submission to the arrival of the last byte.
    """

    direction: Direction
    path: CopyPath
    copy_bytes: int
    num_copies: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PathTable:
    """Measurements of one accelerator, with a look-up of the best path.

    tried: all paths that were available. One without rows was omitted.
    """

    rows: tuple[Measured, ...]
    tried: frozenset[CopyPath]

    def best_first(
        self, direction: Direction, num_copies: int, copy_bytes: float
    ) -> Sequence[CopyPath]:
        """Return the paths by the rate of the nearest measurement, fastest first."""

        def distance(row: Measured) -> float:
            return abs(log2(row.copy_bytes / copy_bytes)) + abs(log2(row.num_copies / num_copies))

        nearest: dict[CopyPath, Measured] = {}
        for row in self.rows:
            if row.direction is direction:
                known = nearest.get(row.path)
                if known is None or distance(row) < distance(known):
                    nearest[row.path] = row
        return sorted(nearest, key=lambda path: -nearest[path].bytes_per_s)

    def findings(self) -> list[Finding]:
        """Return for ``kvtier doctor`` the fastest path by size and its rate, per direction."""
        return [self._finding(direction) for direction in Direction]

    def _finding(self, direction: Direction) -> Finding:
        best: dict[int, Measured] = {}
        for row in self.rows:
            known = best.get(row.copy_bytes)
            if row.direction is direction and (
                known is None or row.bytes_per_s > known.bytes_per_s
            ):
                best[row.copy_bytes] = row
        by_size = [best[size] for size in sorted(best)]
        runs = [list(run) for _, run in groupby(by_size, lambda row: row.path)]
        found = ", ".join(f"{run[0].path} from {_size(run[0].copy_bytes)}" for run in runs)
        rates = ", ".join(f"{_size(r.copy_bytes)} {r.bytes_per_s / 1e9:.1f}" for r in by_size)
        return Finding(f"fastest {direction.value}s", found or "none", f"GB/s: {rates}")


def _size(nbytes: int) -> str:
    return f"{nbytes >> 10} KiB" if nbytes >= 1 << 10 else f"{nbytes} B"


def table_path(identity: str, folder: Path | None = None) -> Path:
    """Return the file of an accelerator and its versions."""
    name = blake2b(identity.encode(), digest_size=8).hexdigest()
    return (folder or cache_folder()) / f"copy-paths-{name}.json"


def load_table(path: Path) -> PathTable | None:
    """Return the saved table; None if there is none, or it cannot be read."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["version"] != VERSION:
            return None
        return PathTable(
            tuple(
                Measured(
                    Direction(row["direction"]),
                    CopyPath(row["path"]),
                    int(row["copy_bytes"]),
                    int(row["num_copies"]),
                    float(row["bytes_per_s"]),
                )
                for row in saved["rows"]
            ),
            frozenset(map(CopyPath, saved["tried"])),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.info("calibration can't be read path=%s error=%s", path, error)
        return None


def save_table(table: PathTable, path: Path, identity: str) -> bool:
    """Write the table atomically. Return False if the folder cannot be written."""
    content = {
        "version": VERSION,
        "accelerator": identity,
        "tried": sorted(table.tried),
        "rows": [asdict(row) for row in table.rows],
    }
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
        ) as file:
            json.dump(content, file, indent=1, default=_word)
        Path(file.name).replace(path)
    except OSError as error:
        logger.info("calibration not saved path=%s error=%s", path, error)
        return False
    return True


def _word(direction: object) -> str:
    assert isinstance(direction, Direction)
    return direction.value
