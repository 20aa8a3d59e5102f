"""``kvtier dashboard``: what to give to Grafana and Prometheus."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def dashboard(
    alerts: Annotated[
        bool, typer.Option("--alerts", help="Print alerts for Prometheus instead.")
    ] = False,
) -> None:
    """Print a dashboard for Grafana: kvtier serve, and vLLM and SGLang with kvtier under them."""
    from kvtier.tools.dashboard import ALERTS, ROWS, make_dashboard, make_rules

    if alerts:
        typer.echo(make_rules(ALERTS), nl=False)
    else:
        typer.echo(json.dumps(make_dashboard(ROWS), indent=2))
