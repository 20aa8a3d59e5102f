"""Output of a benchmark: tables for the terminal, JSON for files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def report(result: dict[str, Any], path: str | None, *tables: Table) -> None:
    """Print tables and targets, and write the result as JSON to ``path``; "-" is stdout."""
    console = Console(stderr=path == "-")
    for each in (*tables, *result["targets"]):
        console.print(each)
    if path == "-":
        json.dump(result, sys.stdout, indent=1)
        print()
    elif path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
