"""Codecs by name, and coders from settings."""

from __future__ import annotations

from typing import Final

from kvtier.core.config import CodingConfig
from kvtier.core.errors import ConfigError
from kvtier.core.system.plugins import known_plugins, load_plugin
from kvtier.layout import KVGroup
from kvtier.tiers.codecs.codec import FIRST_PLUGIN, LAST_NUMBER, Codec
from kvtier.tiers.codecs.encryption import read_keyring
from kvtier.tiers.codecs.frame import BlockCoder

NONE: Final = "none"
AUTO: Final = "auto"
LOSSLESS: Final = "lossless"


def make_codec(name: str) -> Codec:
    """Return the codec that is called ``name``.

    Raises ``ConfigError`` if there is none, if it needs a missing package, or if its number is not
    allowed.
    """
    known = known_plugins("codecs")
    if name not in known:
        choices = ", ".join([NONE, AUTO, *sorted(known)])
        raise ConfigError(f"codec: {name!r} is unknown; use one of {choices}")
    made = load_plugin("codecs", name)()
    if not isinstance(made, Codec):
        raise ConfigError(f"codec: {name!r} makes a {type(made).__name__}, not a codec")
    is_ours = type(made).__module__.startswith("kvtier.")
    if not (1 if is_ours else FIRST_PLUGIN) <= made.number <= LAST_NUMBER:
        raise ConfigError(
            f"codec: {name!r} has the number {made.number}; a plug-in's is {FIRST_PLUGIN} to "
            f"{LAST_NUMBER}"
        )
    return made


def check_coding(options: CodingConfig) -> None:
    """Raise ``ConfigError`` for a codec or keys that can't be used here."""
    if options.codec != NONE:
        make_codec(LOSSLESS if options.codec == AUTO else options.codec)
    read_keyring(options.encryption_key)


def is_lossy(name: str) -> bool:
    """Return whether blocks of the codec that is called ``name`` come back changed."""
    is_known = name in known_plugins("codecs")
    return is_known and bool(getattr(load_plugin("codecs", name), "is_lossy", False))


def make_coder(
    options: CodingConfig, group: KVGroup, place: str = "", is_framing: bool = False
) -> BlockCoder:
    """Return the coder of a tier.

    It reads blocks of every codec that is installed and keeps all bits, whichever codec it writes
    with. It reads blocks of a lossy codec only if it writes with that one.

    group: shape of the blocks.
    place, is_framing: see ``BlockCoder``.

    Raises ``ConfigError``.
    """
    is_auto = options.codec == AUTO
    codec = None
    if options.codec != NONE:
        codec = make_codec(LOSSLESS if is_auto else options.codec).fit(group)
    keyring = read_keyring(options.encryption_key)
    return BlockCoder(
        group.bytes_per_block, codec, _readers(codec), keyring, place, is_auto, is_framing
    )


def _readers(codec: Codec | None) -> tuple[Codec, ...]:
    """Return all exact codecs whose packages are installed, and ``codec``, one per number."""
    found = {} if codec is None else {codec.number: codec}
    for name in sorted(known_plugins("codecs")):
        try:
            made = make_codec(name)
        except Exception:
            continue
        if not made.is_lossy:
            found.setdefault(made.number, made)
    return tuple(found.values())
