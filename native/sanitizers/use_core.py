"""pytest plugin: the native core is the file named by KVTIER_SANITIZED_CORE, not the installed one.

An editable install finds its own core before it looks at any path, so the other one is loaded here,
before anything imports ``kvtier``. Nothing installed changes.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

_path = os.environ["KVTIER_SANITIZED_CORE"]
_spec = importlib.util.spec_from_file_location("kvtier._native", _path)
if _spec is None or _spec.loader is None or "kvtier" in sys.modules:
    raise ImportError(f"{_path} cannot take the place of kvtier._native")
sys.modules["kvtier._native"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["kvtier._native"])
importlib.import_module("kvtier")._native = sys.modules["kvtier._native"]  # as an import would


def pytest_report_header() -> str:
    return f"native core: {_path}"
