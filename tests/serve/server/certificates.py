"""An authority of the tests' own, and servers' certificates from it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Files:
    """In PEM."""

    certificate: Path
    key: Path


class Authority:
    """folder: where files go."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self._folder = folder

    def context(self) -> ssl.SSLContext:
        """For clients that trust it, and nobody else."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._authority.configure_trust(made)
        return made

    def write(self, name: str = "server") -> Files:
        """A new certificate for this machine, with a key of its own."""
        issued = self._authority.issue_cert("127.0.0.1", "localhost")
        files = Files(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        issued.private_key_pem.write_to_path(str(files.key))
        files.certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        return files
