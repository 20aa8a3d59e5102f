"""Split a user's capacity among ranks and pools."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.connectors.sglang.shared.identity import StorageConfig, is_replicated
from kvtier.core.errors import ConfigError

SLOT_BYTES = 4096
"""Alignment of a page's slot in storage."""


def slot_bytes(page_bytes: int) -> int:
    """Return the bytes that a page takes in storage."""
    return -(-page_bytes // SLOT_BYTES) * SLOT_BYTES


def room(
    setting: str,
    num_bytes: int,
    config: StorageConfig,
    options: object,
    page_bytes: Mapping[str, int],
) -> dict[str, int]:
    """Return this rank's capacity for each pool, in bytes. All pools get the same number of pages.

    Args:
        setting: name of the setting that gives ``num_bytes``, for messages.
        num_bytes: capacity of all ranks on this machine.
        config: this rank.
        options: SGLang's ``ServerArgs``, or None.
        page_bytes: bytes per page of each pool.

    Raises:
        ConfigError: the capacity is below one page.
    """
    replicas: int = getattr(options, "dp_size", 1) or 1
    machines: int = getattr(options, "nnodes", 1) or 1
    groups = config.pp_size * config.attn_cp_size * replicas / machines
    slots = {name: slot_bytes(each) for name, each in page_bytes.items()}
    bytes_per_page = sum(
        each * (1 if is_replicated(config, name) else config.tp_size) * groups
        for name, each in slots.items()
    )
    num_pages = int(num_bytes / bytes_per_page)
    if num_pages < 1:
        raise ConfigError(
            f"{setting}: {num_bytes} bytes are below one page of all ranks and pools "
            f"({bytes_per_page:.0f} bytes); raise it"
        )
    return {name: num_pages * each for name, each in slots.items()}
