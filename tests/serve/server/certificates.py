"""A certificate authority for tests, and server certificates that it issues."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Files:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority that writes into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self._folder = folder

    def context(self) -> ssl.SSLContext:
        """Return a context for clients that trust only this authority."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._authority.configure_trust(made)
        return made

    def write(self, name: str = "server") -> Files:
        """Write a new certificate for this machine, with a key of its own."""
        issued = self._authority.issue_cert("127.0.0.1", "localhost")
        files = Files(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        issued.private_key_pem.write_to_path(str(files.key))
        files.certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        return files
