"""Encryption of stored blocks: AES-256-GCM with a key of its own for each block.

A block's key and nonce are derived from the user's key and 24 random bytes, as XAES-256-GCM
describes (c2sp.org/XAES-256-GCM). Random bytes of that length do not repeat, however many processes
write, so no counter is kept.
"""

from __future__ import annotations

import binascii
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blake3 import blake3

from kvtier.core.errors import ConfigError, install_command, printable
from kvtier.core.system.private_files import read_key_file
from kvtier.core.system.user_paths import user_path

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_VARIABLE: Final = "KVTIER_ENCRYPTION_KEY"
"""Environment variable that is read where no setting names a key."""
NO_KEY: Final = "none"
"""Setting without a key, whatever the environment says."""
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 24
TAG_BYTES: Final = 16
COMMAND_S: Final = 30.0
MAX_TEXT: Final = 1 << 16
ID_CONTEXT: Final = "2026-11-26 kvtier: id of an encryption key"
HEX_RUN: Final = re.compile("[0-9A-Fa-f]{16,}")
HINT: Final = 'write "file:/path", "env:NAME" or "command:program arguments"'


@dataclass(frozen=True, slots=True, repr=False)
class _Key:
    number: int
    secret: bytes
    mask: bytes


class Keyring:
    """Keys of stored blocks: the first one encrypts, all of them decrypt. Thread-safe.

    Raises ``ConfigError`` for keys of the wrong length, and if ``cryptography`` is missing.

    keys: 32 bytes each, at least one.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, aead, algorithms, modes

            self._new_cipher = aead.AESGCM
            aead.AESGCM.encrypt_into  # noqa: B018 - of 47 and later
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                "encryption_key: needs the package cryptography, 47 or later; install it: "
                f"{install_command('encryption')}"
            ) from error

        def encrypt_blocks(secret: bytes, blocks: bytes) -> bytes:
            made = Cipher(algorithms.AES256(secret), modes.ECB()).encryptor()
            return made.update(blocks) + made.finalize()

        self._encrypt_blocks = encrypt_blocks
        self._invalid = InvalidTag
        if not keys or any(len(key) != KEY_BYTES for key in keys):
            raise ConfigError("encryption_key: a key has 32 bytes; make one: openssl rand -hex 32")
        self._keys: dict[int, _Key] = {}
        for secret in keys:
            made = _Key(key_id(secret), secret, self._mask(secret))
            if made.number in self._keys:
                raise ConfigError("encryption_key: a key is given twice")
            self._keys[made.number] = made

    def __repr__(self) -> str:
        return f"Keyring({', '.join(f'{number:08x}' for number in self._keys)})"

    @property
    def current(self) -> int:
        """Id of the key that encrypts."""
        return next(iter(self._keys))

    def has(self, number: int) -> bool:
        """Return whether blocks of the key with this id can be decrypted."""
        return number in self._keys

    def seal(self, nonce: bytes, known: bytes, plain: memoryview, into: memoryview) -> None:
        """Encrypt with the current key.

        nonce: 24 random bytes, for this call only.
        known: bytes that are authenticated, too.
        into: as many bytes as ``plain`` and ``TAG_BYTES``.
        """
        cipher, its_nonce = self._cipher(self.current, nonce)
        cipher.encrypt_into(its_nonce, plain, known, into)

    def open(
        self, number: int, nonce: bytes, known: bytes, sealed: memoryview, into: memoryview
    ) -> bool:
        """Decrypt what ``seal`` wrote, and return whether it was that.

        number: id of the key, which must be here.
        into: as many bytes as ``sealed`` without ``TAG_BYTES``.
        """
        cipher, its_nonce = self._cipher(number, nonce)
        try:
            cipher.decrypt_into(its_nonce, sealed, known, into)
        except self._invalid:
            return False
        return True

    def _cipher(self, number: int, nonce: bytes) -> tuple[AESGCM, bytes]:
        """Return the cipher and the nonce of one block."""
        key = self._keys[number]
        blocks = b"".join(_xor(bytes((0, at, ord("X"), 0)) + nonce[:12], key.mask) for at in (1, 2))
        return self._new_cipher(self._encrypt_blocks(key.secret, blocks)), nonce[12:]

    def _mask(self, secret: bytes) -> bytes:
        """Return K1 of CMAC."""
        whole = int.from_bytes(self._encrypt_blocks(secret, bytes(16))) << 1
        return ((whole ^ (0x87 if whole >> 128 else 0)) & ((1 << 128) - 1)).to_bytes(16)


def names_key(setting: str) -> bool:
    """Return whether ``encryption_key``, or else the environment, names a key."""
    return setting != NO_KEY and bool(setting or os.environ.get(KEY_VARIABLE))


def key_id(secret: bytes) -> int:
    """Return the id of a key, 1 to 2^32 - 1. It says nothing about the key."""
    digest = blake3(secret, derive_key_context=ID_CONTEXT).digest(4)
    return int.from_bytes(digest, "little") or 1


def read_keyring(setting: str) -> Keyring | None:
    """Return the keys that ``encryption_key`` names; None if there are none.

    A source gives one key per line, as 64 hexadecimal digits. The first key encrypts; the others
    decrypt what was written before. Empty lines, and lines that begin with #, are ignored.

    setting: "file:/path", "env:NAME" or "command:program arguments"; "" for the value of
        ``KVTIER_ENCRYPTION_KEY`` in the environment, if it is set; "none" for none in any case.

    Raises ``ConfigError``. No message contains a part of a key.
    """
    if not names_key(setting):
        return None
    kind, _, source = (setting or f"env:{KEY_VARIABLE}").partition(":")
    if kind == "file" and source:
        text = _read_file(user_path(source))
    elif kind == "env" and source:
        text = os.environ.get(source, "")
    elif kind == "command" and source:
        text = _run(source)
    else:  # it may be the key itself
        raise ConfigError(f"encryption_key: the setting names no source of keys; {HINT}")
    lines = [line.strip() for line in text.splitlines()]
    keys = [_parse(line, kind) for line in lines if line and not line.startswith("#")]
    if not keys:
        what = "the command" if kind == "command" else f"{kind}:{_without_keys(source)}"
        raise ConfigError(f"encryption_key: {what} gives no key; {HINT}")
    return Keyring(keys)


def _parse(line: str, kind: str) -> bytes:
    try:
        found = binascii.unhexlify(line)
    except ValueError:
        found = b""
    if len(found) != KEY_BYTES:
        raise ConfigError(
            f"encryption_key: the {kind} has a line that is no key; write 64 hexadecimal digits, "
            "as openssl rand -hex 32 makes them"
        )
    return found


def _without_keys(source: str) -> str:
    """Return the name of a file or variable, printable, without what may be a part of a key."""
    return HEX_RUN.sub("(hexadecimal digits)", printable(source))


def _read_file(path: Path) -> str:
    shown = _without_keys(str(path))
    try:
        return read_key_file(path).decode()
    except (OSError, ValueError) as error:  # a path may have a NUL in it
        what = getattr(error, "strerror", "") or "no text; put 64 hexadecimal digits"
        raise ConfigError(f"encryption_key: {shown}: {what}") from None


def _run(command: str) -> str:
    try:
        ended = subprocess.run(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=COMMAND_S,
            check=True,
            text=True,
        )
    except subprocess.CalledProcessError as error:
        raise ConfigError(
            f"encryption_key: the command ended with {error.returncode}; see what it prints"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"encryption_key: the command took more than {COMMAND_S:g} s; see what it waits for"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "") or "it can't be parsed"
        raise ConfigError(f"encryption_key: the command can't be run: {reason}") from None
    return ended.stdout[:MAX_TEXT]


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
