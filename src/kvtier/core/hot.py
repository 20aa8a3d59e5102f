"""Hot functions: those of the native core where it was built, their Python twins elsewhere.

``KVTIER_NATIVE=off`` in the environment selects the twins, to compare or to rule out the core.
"""

from __future__ import annotations

import os
from typing import Final

_wanted = os.environ.get("KVTIER_NATIVE", "auto")
if _wanted not in ("auto", "on", "off"):
    raise ValueError(f"KVTIER_NATIVE={_wanted!r} in the environment: use auto, on or off")

_reason = ""
if _wanted == "off":
    _reason = "switched off by KVTIER_NATIVE=off in the environment"
else:
    try:
        from kvtier._native import (
            BlockTrie,
            FreeSlots,
            KeyIndex,
            Keys,
            KeyTable,
            LivePolicy,
            Numbers,
            PolicyReplay,
            SlotTable,
            UringRing,
            choose_planes,
            copy_batch,
            copy_checked,
            crc32c,
            crc32c_many,
            crc32c_rows,
            free_rows,
            join_planes,
            pack_tokens,
            quantize_channels,
            receive_values,
            restore_channels,
            split_planes,
        )
    except ImportError as error:
        if _wanted == "on":
            raise
        _reason = (
            f"not built ({error}); install kvtier from source on a machine with a C++20 compiler"
        )

if _reason:
    from kvtier.core.reference.copy import copy_batch, copy_checked
    from kvtier.core.reference.crc import crc32c, crc32c_many, crc32c_rows
    from kvtier.core.reference.free_slots import FreeSlots, free_rows  # type: ignore[assignment]
    from kvtier.core.reference.key_table import KeyTable  # type: ignore[assignment]
    from kvtier.core.reference.packed import Keys, Numbers  # type: ignore[assignment]
    from kvtier.core.reference.planes import choose_planes, join_planes, split_planes
    from kvtier.core.reference.quantize import quantize_channels, restore_channels
    from kvtier.core.reference.receive import receive_values
    from kvtier.core.reference.slot_table import SlotTable  # type: ignore[assignment]
    from kvtier.core.reference.tokens import pack_tokens

    # Its twin knows policies and keys, and is kvtier.index.python_index.
    BlockTrie = None  # type: ignore[assignment,misc]
    # Its twin is kvtier.index.python_key_index.
    KeyIndex = None  # type: ignore[assignment,misc]
    # Policies other than LRU have no twin.
    LivePolicy = None  # type: ignore[assignment,misc]
    PolicyReplay = None  # type: ignore[assignment,misc]
    # Its twin is kvtier.tiers.disk.io.preadv.
    UringRing = None  # type: ignore[assignment,misc]

NATIVE: Final = not _reason
"""Whether the functions here are the native ones."""

NATIVE_REASON: Final = _reason
"""Why they are not; empty if they are."""

__all__ = [
    "NATIVE",
    "NATIVE_REASON",
    "BlockTrie",
    "FreeSlots",
    "KeyIndex",
    "KeyTable",
    "Keys",
    "LivePolicy",
    "Numbers",
    "PolicyReplay",
    "SlotTable",
    "UringRing",
    "choose_planes",
    "copy_batch",
    "copy_checked",
    "crc32c",
    "crc32c_many",
    "crc32c_rows",
    "free_rows",
    "join_planes",
    "pack_tokens",
    "quantize_channels",
    "receive_values",
    "restore_channels",
    "split_planes",
]
