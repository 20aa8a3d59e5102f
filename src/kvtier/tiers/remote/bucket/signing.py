"""Ed25519 signatures of pack files, by keys in PEM as ``openssl genpkey`` makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtier.core.errors import ConfigError, install_command, printable
from kvtier.core.system.private_files import read_key_file
from kvtier.core.system.user_paths import user_path

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PUBLIC_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
NEW_KEY: Final = "openssl genpkey -algorithm ed25519 -out FILE"
NEW_PUBLIC_KEY: Final = "openssl pkey -in KEY -pubout -out FILE"


class Signer:
    """Signs with the private key in a file. Raises ``ConfigError`` for any other file.

    public_key: the key that its signatures are verified with.
    """

    def __init__(self, path: str) -> None:
        ed25519, serialization = _library()
        key = _load(path, "sign_key", lambda pem: serialization.load_pem_private_key(pem, None))
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise _refused(path, "sign_key", "is no private key of Ed25519", NEW_KEY)
        self._key: Ed25519PrivateKey = key
        self.public_key: bytes = key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message."""
        return self._key.sign(message)


def read_public_key(path: str) -> bytes:
    """Return the public key in a file. Raises ``ConfigError`` for any other file."""
    ed25519, serialization = _library()
    key = _load(path, "public_key", serialization.load_pem_public_key)
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise _refused(path, "public_key", "is no public key of Ed25519", NEW_PUBLIC_KEY)
    return bytes(key.public_bytes_raw())


def is_signed(message: bytes, signature: bytes, public_key: bytes) -> bool:
    """Return whether a message has a valid signature of the key."""
    ed25519, _ = _library()
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def _load(path: str, setting: str, read: Any) -> object:
    """Return the key in a file, of any kind; None for a file that has no such key."""
    try:
        pem = read_key_file(user_path(path), is_public=setting == "public_key")
    except OSError as error:
        raise ConfigError(f"{setting}: {printable(path)}: {error.strerror}") from None
    try:
        key: object = read(pem)
    except (ValueError, TypeError):  # TypeError: the key is encrypted
        return None
    return key


def _refused(path: str, setting: str, what: str, command: str) -> ConfigError:
    return ConfigError(f"{setting}: {printable(path)} {what}; make one: {command}")


def _library() -> tuple[Any, Any]:
    """Return the modules of ``cryptography`` for keys and for their files."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigError(
            "signatures of pack files need the package cryptography; install it: "
            f"{install_command('encryption')}"
        ) from error
    return ed25519, serialization
