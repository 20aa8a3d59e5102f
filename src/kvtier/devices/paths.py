"""Copy paths: ways to do many small copies, and the choice among them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from math import log2
from typing import TYPE_CHECKING

from kvtier.core.errors import ConfigError, DeviceError
from kvtier.devices.base import Direction, Finding
from kvtier.devices.compute import Handle
from kvtier.devices.copies import Copies, rectangles
from kvtier.devices.driver import Driver
from kvtier.devices.kernel import CopyKernel
from kvtier.devices.library import DriverError

if TYPE_CHECKING:
    from kvtier.devices.path_table import PathTable

logger = logging.getLogger(__name__)

BATCH_VARIABLE = "KVTIER_BATCH_COPY"


class CopyPath(StrEnum):
    """Ways to submit many small copies to an accelerator."""

    BATCH = "batch"
    """One driver call for all copies."""
    KERNEL = "kernel"
    """A kernel on the accelerator that reads and writes host memory itself."""
    ROWS = "rows"
    """One 2-D copy per rectangle, if the copies form any."""
    EACH = "each"
    """One call per copy."""


UNMEASURED = (CopyPath.BATCH, CopyPath.ROWS, CopyPath.EACH)
"""Copy paths in order of preference if nothing was measured."""


LONG_BYTES = 128 << 10
"""Copies of this size are left to copy engines. A kernel is as fast, but slows down compute beside
it; for smaller copies the driver does so too, since it takes 1 us to submit each."""


class CopyPaths:
    """Submits copies to the driver by the fastest path that can do them.

    The batch call may be missing, or refused at its first use; the other paths are used then, and
    the reason is logged once. Environment variable ``KVTIER_BATCH_COPY``: "off" never uses it, "on"
    requires it, "auto" tries it.
    """

    def __init__(self, driver: Driver, kernel: CopyKernel | None = None) -> None:
        self._driver = driver
        self._kernel = kernel
        self._batch_has_worked = False
        self._ranking: PathTable | None = None
        self._orders: dict[tuple[Direction, int, int], list[CopyPath]] = {}
        """Usable paths, best first, by direction and the exponents of number and size."""
        self.why_not: dict[CopyPath, str] = {}
        wanted = os.environ.get(BATCH_VARIABLE, "auto")
        if wanted not in ("auto", "on", "off"):
            raise ConfigError(
                f"{BATCH_VARIABLE}={wanted!r} in the environment: use auto, on or off"
            )
        self._needs_batch = wanted == "on"
        if self._needs_batch and driver.why_no_batch:
            raise DeviceError(
                f"{driver.name}: {BATCH_VARIABLE}=on in the environment, but "
                f"{driver.why_no_batch}; use auto, or a newer driver"
            )
        if wanted == "off":
            self._drop(CopyPath.BATCH, f"switched off by {BATCH_VARIABLE}=off in the environment")
        elif driver.why_no_batch:
            self._drop(CopyPath.BATCH, driver.why_no_batch)

    @property
    def usable(self) -> list[CopyPath]:
        """The paths that can be tried."""
        known = [path for path in CopyPath if path not in self.why_not]
        return [path for path in known if path is not CopyPath.KERNEL or self._kernel is not None]

    def submit(
        self,
        copies: Copies,
        direction: Direction,
        stream: Handle,
        is_reachable: bool,
        only: CopyPath | None = None,
    ) -> list[object]:
        """Queue all copies on ``stream``. Return objects that must stay alive until they are done.

        is_reachable: whether kernels can access the host's side; accessing other memory would kill
        them.
        only: the one path to use, for measurements. Raises ``DeviceError`` if it cannot do the
        copies.
        """
        if not len(copies):
            return []
        for path in self._order(copies, direction) if only is None else (only,):
            if path is CopyPath.KERNEL and not is_reachable:
                continue
            try:
                alive = self._try(path, copies, direction, stream)
            except (DriverError, RuntimeError) as error:
                # Copies before the refused one may be in flight, from arrays that are freed now.
                with suppress(DriverError):
                    self._driver.synchronize(stream)
                if only is not None or not self._does_without(path, error):
                    raise
                continue
            if alive is not None:
                return alive
        raise DeviceError(f"{self._driver.name}: no way to do {len(copies)} copies by {only}")

    def rank(self, ranking: PathTable) -> None:
        """Choose by these measurements from now on."""
        self._ranking = ranking
        self._orders.clear()

    def _order(self, copies: Copies, direction: Direction) -> list[CopyPath]:
        """Return the usable paths, the best one first."""
        count, size = (round(log2(each)) for each in (len(copies), copies.mean_size))
        if (direction, count, size) not in self._orders:
            ranked: Sequence[CopyPath] = ()
            if self._ranking is not None:
                ranked = self._ranking.best_first(direction, 1 << count, 1 << size)
            order = list(dict.fromkeys([*ranked, *UNMEASURED]))
            if 1 << size >= LONG_BYTES:
                order.sort(key=lambda path: path is CopyPath.KERNEL)
            self._orders[direction, count, size] = [path for path in order if path in self.usable]
        return self._orders[direction, count, size]

    def _try(
        self, path: CopyPath, copies: Copies, direction: Direction, stream: Handle
    ) -> list[object] | None:
        """Queue the copies by ``path``; return None if it cannot do such copies."""
        if path is CopyPath.BATCH:
            pieces = copies.pieces(self._driver.max_copies)
            for piece in pieces:
                self._driver.copy_batch(piece, direction, stream)
            self._batch_has_worked = True
            return list(pieces)
        if path is CopyPath.KERNEL:
            if self._kernel is None or not self._kernel.takes(copies):
                return None
            return self._kernel.copy(copies, stream)
        if path is CopyPath.ROWS:
            rows = rectangles(copies)
            if rows is None:
                return None
            self._driver.copy_rows(rows, direction, stream)
            return []
        self._driver.copy_each(copies, direction, stream)
        return []

    def _does_without(self, path: CopyPath, error: Exception) -> bool:
        """Whether to disable ``path`` from now on.

        The first batch may be refused for any reason: if the copies themselves are invalid, single
        copies fail, too.
        """
        if path is CopyPath.BATCH:
            is_refusal = isinstance(error, DriverError) and self._driver.is_refusal(error.code)
            if self._needs_batch or (self._batch_has_worked and not is_refusal):
                return False
        elif path is not CopyPath.KERNEL:
            return False
        self._drop(path, str(error))
        return True

    def _drop(self, path: CopyPath, reason: str) -> None:
        self.why_not[path] = reason
        self._orders.clear()
        logger.info("%s copies without path=%s: %s", self._driver.name, path.value, reason)

    def close(self) -> None:
        """Release the kernel's memory; nothing may be in flight."""
        if self._kernel is not None:
            self._kernel.close()

    def finding(self) -> Finding:
        """Return the copy path in use, for ``kvtier doctor``."""
        found = "one batch call" if CopyPath.BATCH in self.usable else "2-D and single copies"
        return Finding("copy path", found, "; ".join(self.why_not.values()))
