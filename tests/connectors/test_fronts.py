"""Parts of the vLLM connectors that may import ``v1/kv_offload``."""

from __future__ import annotations

import ast
from pathlib import Path

from kvtier.connectors import vllm

FOLDER = Path(vllm.__file__).parent
ITS_FRONTS = ("offloading", "standalone")
REGISTERS = "__init__.py"
"""Registers these fronts with vLLM's factories."""


def _imports(file: Path) -> set[str]:
    """Return the modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
    return found


def test_only_its_own_fronts_import_vllms_offloading() -> None:
    importers = {
        str(file.relative_to(FOLDER))
        for file in FOLDER.rglob("*.py")
        if any("kv_offload" in each or ".v1.offloading" in each for each in _imports(file))
    }
    assert len(importers) > 3, "or the test looks at the wrong names"
    elsewhere = {importer for importer in importers if not importer.startswith(ITS_FRONTS)}
    assert elsewhere == {REGISTERS}
