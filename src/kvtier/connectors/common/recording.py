"""Record an engine's requests for ``kvtier replay``. Requests are served even if that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtier.connectors.common.settings import ConnectorSettings
from kvtier.core.config import BLOCK_SIZE
from kvtier.core.errors import ConfigError
from kvtier.core.system.user_paths import user_path
from kvtier.observe.recording import Chains, Recorder, salt_from_environment

logger = logging.getLogger(__name__)

Count = Callable[[bool], None]
"""Called for each request, from any thread, with whether it was written."""
WRITTEN, DROPPED = "written", "dropped"


def outcome(written: bool) -> str:
    """Return the outcome's label in the metrics."""
    return WRITTEN if written else DROPPED


def record_tokens(block_tokens: int) -> int:
    """Return the tokens per key of a recording, for an engine with blocks of ``block_tokens``.

    It is the least multiple of ``block_tokens`` that is at least ``BLOCK_SIZE``.
    """
    return -(-BLOCK_SIZE // block_tokens) * block_tokens


def open_recorder(
    settings: ConnectorSettings, block_tokens: int, count: Count, replica: str = ""
) -> Recorder | None:
    """Open a recorder if the settings enable it. If the file can't be written, log that.

    Args:
        settings: the connector's settings.
        block_tokens: tokens per key.
        count: called for each request.
        replica: name of this engine among several with the same settings; each has its own file.
    """
    if not settings.record:
        return None
    path = user_path(settings.record)
    if replica:
        path = path.with_stem(f"{path.stem}-{replica}")
    has_dropped = False

    def count_and_warn(written: bool) -> None:
        nonlocal has_dropped
        if not written and not has_dropped:
            has_dropped = True
            logger.warning("some requests are not in the recording path=%s", path)
        count(written)

    try:
        chains = Chains(salt_from_environment(), block_tokens)
        return Recorder(path, chains, settings.record_bytes, count_and_warn)
    except ConfigError as error:
        logger.warning("kvtier serves without a recording: %s", error)
        return None
