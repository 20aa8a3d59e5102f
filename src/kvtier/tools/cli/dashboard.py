"""``kvtier dashboard``: a dashboard for Grafana, and alerts for Prometheus."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

import typer


def dashboard(
    alerts: Annotated[
        bool, typer.Option("--alerts", help="Print alerts for Prometheus instead.")
    ] = False,
) -> None:
    """Print a Grafana dashboard for kvtier serve, vLLM, SGLang and nodes."""
    name = "kvtier-rules.yml" if alerts else "kvtier.json"
    typer.echo((files("kvtier.tools") / "dashboard" / name).read_text(encoding="utf-8"), nl=False)
