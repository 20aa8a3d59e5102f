"""Record an engine's requests for ``kvtier replay``.

Requests go on whatever becomes of the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from kvtier.config import BLOCK_SIZE
from kvtier.connectors.common.settings import ConnectorSettings
from kvtier.errors import ConfigError
from kvtier.recording import Chains, Recorder, salt_from_environment

logger = logging.getLogger(__name__)

Count = Callable[[bool], None]
"""Told of each request whether it was written, from any thread."""
WRITTEN, DROPPED = "written", "dropped"
MEANING = "Requests written to the recording, or dropped since its queue was full."


def outcome(written: bool) -> str:
    """Return the outcome's label in the metrics."""
    return WRITTEN if written else DROPPED


def record_tokens(block_tokens: int) -> int:
    """Tokens per key of a recording, for an engine that caches blocks of ``block_tokens``.

    Whole blocks, as many as make what is worth a key.
    """
    return -(-BLOCK_SIZE // block_tokens) * block_tokens


def open_recorder(
    settings: ConnectorSettings, block_tokens: int, count: Count, replica: str = ""
) -> Recorder | None:
    """Open a recorder if the settings ask for one. A file that cannot be written is one log line.

    block_tokens: per key. replica: which of several engines with the same settings this is: each
    has a file of its own.
    """
    if not settings.record:
        return None
    path = Path(settings.record).expanduser()
    if replica:
        path = path.with_stem(f"{path.stem}-{replica}")
    try:
        chains = Chains(salt_from_environment(), block_tokens)
        return Recorder(path, chains, settings.record_bytes, _Told(path, count))
    except ConfigError as error:
        logger.warning("kvtier serves without a recording: %s", error)
        return None


class _Told:
    """Counts, and says once that requests are left out."""

    def __init__(self, path: Path, count: Count) -> None:
        self._path = path
        self._count = count
        self._has_dropped = False

    def __call__(self, written: bool) -> None:
        if not written and not self._has_dropped:
            self._has_dropped = True
            logger.warning("some requests are not in the recording path=%s", self._path)
        self._count(written)
