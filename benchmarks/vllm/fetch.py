"""Fetch vLLM's multi-turn benchmark from its source archive.

    python -m benchmarks.vllm.fetch        `make peers-vllm` does it

No wheel has it, and pip would build the archive. The archive comes from the package index of pip's
configuration, and the scripts are written to ``.peers/vllm-benchmarks``.
"""

from __future__ import annotations

import hashlib
import html
import io
import os
import re
import ssl
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path, PurePosixPath
from urllib.parse import urldefrag, urljoin

from benchmarks.peers import ENVIRONMENTS

FOLDER = ENVIRONMENTS / "vllm-benchmarks"
VERSION = "0.32.0"
INSIDE = "benchmarks/multi_turn"
PYPI = "https://pypi.org/simple"


def setting(name: str) -> str | None:
    """Return a setting of pip: from a variable or a file."""
    if value := os.environ.get("PIP_" + name.upper().replace("-", "_")):
        return value
    for section in ("install", "global"):
        asked = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", f"{section}.{name}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode == 0:
            return asked.stdout.strip()
    return None


def find_link(page: str, address: str, name: str) -> tuple[str, str | None]:
    """Return the URL of a file on an index's page, and its SHA-256. Raises LookupError."""
    for href in re.findall(r"""href=["']([^"']+)["']""", page):
        link, fragment = urldefrag(urljoin(address, html.unescape(href)))
        if PurePosixPath(link).name == name:
            return link, fragment.removeprefix("sha256=") if "sha256=" in fragment else None
    raise LookupError(f"{address} has no {name}")


def unpack(archive: bytes, folder: Path) -> list[Path]:
    """Write the benchmark's own files into one flat folder. Return their paths."""
    written = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if str(PurePosixPath(*path.parts[1:-1])) == INSIDE and path.suffix == ".py":
                content = tar.extractfile(member)
                assert content is not None, "a file has content"
                folder.mkdir(parents=True, exist_ok=True)
                written.append(folder / path.name)
                written[-1].write_bytes(content.read())
    return written


def source_archive(name: str, version: str) -> bytes:
    """Return a project's source distribution, from the index of pip's configuration."""
    trusted = ssl.create_default_context(cafile=setting("cert"))

    def get(address: str) -> bytes:
        asked = urllib.request.Request(address, headers={"Accept": "text/html, */*;q=0.1"})
        with urllib.request.urlopen(asked, context=trusted, timeout=300) as answer:
            return bytes(answer.read())

    page = f"{(setting('index-url') or PYPI).rstrip('/')}/{name.replace('_', '-')}/"
    link, expected = find_link(get(page).decode(), page, f"{name}-{version}.tar.gz")
    archive = get(link)
    if expected and hashlib.sha256(archive).hexdigest() != expected:
        sys.exit(f"{link}: not the bytes that the index promises")
    return archive


def main() -> None:
    written = unpack(source_archive("vllm", VERSION), FOLDER)
    if not written:
        sys.exit(f"vLLM {VERSION} has no {INSIDE}")
    print(f"{len(written)} files of vLLM {VERSION}'s {INSIDE} are in {FOLDER}")


if __name__ == "__main__":
    main()
