"""``kvtier top``: what a cache does right now, in a terminal."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.api_keys import KEY_VARIABLE, take_key
from kvtier.cli.failure import fail
from kvtier.cli.watch import URL
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.live.scrape import Watched

FIRST_S = 2.0
"""Between the two looks of ``--once``: what happens per second is the difference."""
UNREACHABLE = 1
"""Exit code where the engine does not say how it is."""


def top(
    url: Annotated[
        str, typer.Argument(help="The engine: its address, or that of its metrics.")
    ] = URL,
    once: Annotated[
        bool, typer.Option("--once", help=f"Look for {FIRST_S:.0f} seconds, show, and end.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --once: as JSON, for scripts.")
    ] = False,
    every_s: Annotated[
        float, typer.Option("--every", min=1.0, max=60.0, help="Seconds between two looks.")
    ] = 1.0,
    api_key: Annotated[
        str | None,
        typer.Option(help=f"Key that the engine wants; better given as {KEY_VARIABLE}."),
    ] = None,
) -> None:
    """Show what a cache does right now: of a kvtier server, vLLM or SGLang."""
    from kvtier.live.scrape import Watched

    if as_json and not once:
        fail("top", "--json is one answer: give --once, too")
    try:
        watched = Watched(url, take_key(api_key))
    except ConfigError as error:
        fail("top", error)
    if once:
        _once(watched, as_json)
    else:
        _on_and_on(watched, every_s)


def _once(watched: Watched, as_json: bool) -> None:
    from rich.console import Console

    from kvtier.live.terminal import draw

    watched.look()
    time.sleep(FIRST_S)
    seen = watched.look()
    if seen.picture is None:
        typer.echo(f"kvtier top: {seen.error}", err=True)
        raise typer.Exit(UNREACHABLE)
    if as_json:
        typer.echo(json.dumps(seen.picture, indent=2))
    else:
        Console().print(draw(seen, watched.url))


def _on_and_on(watched: Watched, every_s: float) -> None:
    from rich.live import Live

    from kvtier.live.terminal import Fitted, draw

    try:
        first = Fitted(draw(watched.look(), watched.url))
        with Live(first, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                live.update(Fitted(draw(watched.look(), watched.url)), refresh=True)
    except KeyboardInterrupt:
        return
