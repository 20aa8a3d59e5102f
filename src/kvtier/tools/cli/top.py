"""``kvtier top``: live state of a cache, in a terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.tools.cli.api_keys import ApiKey
from kvtier.tools.cli.failure import fail
from kvtier.tools.cli.output import print_json
from kvtier.tools.cli.watch import URL, Node, watched_by

if TYPE_CHECKING:
    from kvtier.observe.live.scrape import WatchedEngine

FIRST_S = 2.0
"""Seconds between the two readings of ``--once``, whose difference gives the rates."""


def top(
    url: Annotated[str, typer.Argument(help="Address of the engine, or of its metrics.")] = URL,
    once: Annotated[
        bool, typer.Option("--once", help=f"Measure for {FIRST_S:.0f} seconds, print, and exit.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Measure once, and print one JSON object.")
    ] = False,
    every_s: Annotated[
        float, typer.Option("--every", min=1.0, max=60.0, help="Seconds between updates.")
    ] = 1.0,
    api_key: ApiKey = None,
    node: Node = None,
) -> None:
    """Show the live state of the cache of a kvtier server, vLLM, SGLang, or a node.

    Key q quits. Without a terminal it prints once.
    """
    watched = watched_by(url, api_key, node)
    if once or as_json or not sys.stdout.isatty():
        _once(watched, as_json)
    else:
        _on_and_on(watched, every_s)


def _once(watched: WatchedEngine, as_json: bool) -> None:
    from rich.console import Console

    from kvtier.observe.live.terminal import draw

    watched.look()
    time.sleep(FIRST_S)
    seen = watched.look()
    if seen.picture is None:
        fail("top", seen.error)
    if as_json:
        print_json(seen.picture)
    else:
        Console().print(draw(seen, watched.url))


def _on_and_on(watched: WatchedEngine, every_s: float) -> None:
    from rich.live import Live

    from kvtier.observe.live.terminal import Fitted, draw

    try:
        first = Fitted(draw(watched.look(), watched.url))
        with _keys_at_once(), Live(first, screen=True, auto_refresh=False) as live:
            while not _is_quit_within(every_s):
                live.update(Fitted(draw(watched.look(), watched.url)), refresh=True)
    except KeyboardInterrupt:
        return


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Have the terminal pass on each key when it is pressed, and not show it."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_quit_within(seconds: float) -> bool:
    """Wait, at most until a key is pressed. Return whether it is q."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable) and b"q" in os.read(sys.stdin.fileno(), 64)
