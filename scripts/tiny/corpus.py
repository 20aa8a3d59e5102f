"""The text that kvtier-tiny learns from: the standard library of the running interpreter."""

from __future__ import annotations

import ast
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SKIPPED_DIRS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Tables of characters: long, and useless for training.
SKIPPED_FILES = re.compile(
    r"^(encodings/(cp|mac_|iso8859|koi8|kz1048|hp_roman|ptcp|tis_|palmos)\w*\.py"
    r"|pydoc_data/topics\.py|stringprep\.py|html/entities\.py|lib2to3/.*_sysconfigdata.*"
    r"|_sysconfigdata.*\.py)$"
)
# Kept away from training and from the tokenizer, to judge the model by. Several are long enough
# for positions up to 4,096.
HELD_OUT = {
    "asyncio/protocols.py",
    "colorsys.py",
    "dis.py",
    "distutils/log.py",
    "doctest.py",
    "email/message.py",
    "ftplib.py",
    "http/cookiejar.py",
    "json/scanner.py",
    "shelve.py",
    "statistics.py",
    "wsgiref/handlers.py",
    "xml/dom/minidom.py",
}


@dataclass(frozen=True, slots=True)
class Document:
    """One file of the library. ``name`` is its path below the library's root."""

    name: str
    text: str
    held_out: bool


def read_library() -> list[Document]:
    """Return all source files that are used, by name; held-out ones are marked."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        name = "/".join(parts)
        if SKIPPED_DIRS.intersection(parts) or SKIPPED_FILES.match(name):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if not text.strip():
            continue
        text = text.expandtabs().replace("\r\n", "\n")
        documents.append(Document(name, text, held_out=name in HELD_OUT))
    return documents


def read_topics() -> dict[str, str]:
    """Return the language reference's topics that ship with ``pydoc``, as plain text by name."""
    path = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return {str(k): str(v).strip() for k, v in ast.literal_eval(node.value).items()}
    raise ValueError(f"{path} holds no dictionary of topics. Use CPython 3.11 or newer.")
