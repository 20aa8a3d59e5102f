"""Settings of a warm start, and the directory into which it copies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Final

from blake3 import blake3

from kvtier.core.config import parse_size
from kvtier.core.errors import ConfigError
from kvtier.tiers.remote.bucket.bound import SLACK
from kvtier.tiers.remote.bucket.opening import DIRECTORY, PACK_STORES, make_directory
from kvtier.tiers.remote.keeper import StoreKeeper
from kvtier.tiers.remote.migration import place_of
from kvtier.tiers.remote.pruning import SCHEMES, make_keeper
from kvtier.tiers.row import split_storage

COUNTED: Final = 1 / 4
"""Share of the free slack that is copied before the files are counted again."""
LOCK_DIGITS: Final = 16
EXAMPLE: Final = 'storage "dir:///var/kv?capacity=300GiB" and then "s3://bucket/kv"'


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A copy at the start: the hottest blocks of one store, into the directory in front of it.

    far, near: names of the tiers. far_url, near_url: their URLs, in which a password may be.
    max_bytes: largest size of all copied blocks; blocks that the directory already has count, too.
    """

    far: str
    near: str
    far_url: str = field(repr=False)
    near_url: str = field(repr=False)
    max_bytes: int


def warm_start_of(stores: Sequence[str], warm_start: str | int) -> WarmStart | None:
    """Return what the setting ``warm_start`` asks for; None for nothing.

    stores: locations of the stores, fastest first. Raises ``ConfigError`` for impossible ones.
    """
    max_bytes = parse_size(warm_start, "warm_start")
    if not max_bytes:
        return None
    if not stores:
        raise ConfigError(f"warm_start: there is no store to copy from; give {EXAMPLE}")
    near_url = next((each for each in stores[:-1] if split_storage(each)[1] == DIRECTORY), None)
    if near_url is None:
        raise ConfigError(
            "warm_start: there is no directory in front of the last store to copy it into; give "
            f"{EXAMPLE}"
        )
    far, scheme, _ = split_storage(stores[-1])
    if scheme not in (*PACK_STORES, *SCHEMES):
        raise ConfigError(
            f"warm_start: a store of {scheme} can't be listed, so nothing is copied from it; let "
            f"the last store be one of {', '.join((*PACK_STORES, *SCHEMES))}"
        )
    if place_of(stores[-1]) == place_of(near_url):
        raise ConfigError(
            "warm_start: the last store and the directory in front of it are the same place; give "
            f"{EXAMPLE}"
        )
    return WarmStart(far, split_storage(near_url)[0], stores[-1], near_url, max_bytes)


class WarmDirectory:
    """The directory of a warm start, with a lock for one copying process per store and block size.

    url: of the directory. Raises ``ConfigError`` for one of something else.
    """

    def __init__(self, url: str) -> None:
        if split_storage(url)[1] != DIRECTORY:
            raise ConfigError(
                "TO is no directory; give one of this machine: dir:///var/kv?capacity=300GiB"
            )
        location, options = make_directory.read(split_storage(url)[2])
        self._root = Path("/") / location.path
        self._capacity: int = options.capacity
        self._keeper: StoreKeeper = make_keeper(url)
        self._counting = Lock()
        self._left = 0
        self._copied: int | None = None
        self._lock = -1

    def lock(self, far_url: str, block_bytes: int) -> bool:
        """Lock the copy of a store until ``close``, or the end of the process.

        Returns False if another process has the lock: an engine of this machine, or another rank.
        """
        digest = blake3(repr(place_of(far_url)).encode()).hexdigest()[:LOCK_DIGITS]
        path = self._root / f".warm-{digest}-{block_bytes}"
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # no locks there: several processes copy, and skip what they find
            return True
        return True

    def reserve(self, num_bytes: int) -> bool:
        """Return whether so many bytes can be copied without anything being deleted for them.

        Files are counted repeatedly, since requests write to the directory, too. Raises
        ``CacheError`` if the directory can't be read.
        """
        if not self._capacity:
            return True
        slack = self._capacity * SLACK
        with self._counting:
            if self._copied is None or self._copied > slack * COUNTED:
                used = sum(entry.num_bytes for entry in self._keeper.entries())
                self._left, self._copied = int(self._capacity - 2 * slack) - used, 0
            if num_bytes > self._left - self._copied:
                return False
            self._copied += num_bytes
            return True

    def close(self) -> None:
        """Release the lock."""
        self._keeper.close()
        if self._lock >= 0:
            with suppress(OSError):
                os.close(self._lock)
            self._lock = -1
