"""A benchmark's result, for who looks and for who keeps it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def report(result: dict[str, Any], path: str | None, *tables: Table) -> None:
    """The tables and the targets for who looks, the result where it is wanted."""
    console = Console(stderr=path == "-")
    for each in (*tables, *result["targets"]):
        console.print(each)
    if path == "-":
        json.dump(result, sys.stdout, indent=1)
        print()
    elif path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
