"""``kvtier dashboard``: a dashboard for Grafana, and alerts for Prometheus."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def dashboard(
    alerts: Annotated[
        bool, typer.Option("--alerts", help="Print alerts for Prometheus instead.")
    ] = False,
) -> None:
    """Print a Grafana dashboard for kvtier serve, vLLM, SGLang and nodes."""
    from kvtier.tools.dashboard import ALERTS, ROWS, make_dashboard, make_rules

    if alerts:
        typer.echo(make_rules(ALERTS), nl=False)
    else:
        typer.echo(json.dumps(make_dashboard(ROWS), indent=2))
