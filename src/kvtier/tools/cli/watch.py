"""``kvtier watch``: serve the live page for an engine that has none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.core.system.user_paths import check_socket
from kvtier.tools.cli.api_keys import ApiKey, take_key
from kvtier.tools.cli.failure import fail

if TYPE_CHECKING:
    from kvtier.observe.live.scrape import WatchedEngine

URL = "http://127.0.0.1:8000"
Node = Annotated[
    str | None,
    typer.Option(
        "--node",
        help="Path of a node's socket: show the node instead of an engine.",
        show_default="none",
    ),
]


def watched_by(url: str, api_key: str | None, node: str | None) -> WatchedEngine:
    """Return what a command watches: a node by its socket, else an engine by its address."""
    from kvtier.observe.live.scrape import WatchedEngine

    if node is None:
        return WatchedEngine.at(url, take_key(api_key))
    from kvtier.node.config import control_socket

    check_socket(node, "node")
    return WatchedEngine.at_socket(control_socket(Path(node)))


def watch(
    url: Annotated[str, typer.Argument(help="Address of the engine, or of its metrics.")] = URL,
    host: Annotated[str, typer.Option(help="Address to serve the page at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes any free one.")] = 8500,
    api_key: ApiKey = None,
    node: Node = None,
) -> None:
    """Serve a live page of the cache of vLLM, SGLang, a node, or a kvtier server elsewhere.

    A kvtier server has the page itself, at /; so has a node with --control-port.
    """
    from kvtier.observe.live.local import LOCAL_HOSTS, LocalServer

    watched = watched_by(url, api_key, node)
    try:
        server = LocalServer(watched, host, port)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        fail("watch", f"{host}:{port}: {why}; give another --host or --port")
    if host not in LOCAL_HOSTS:
        typer.echo(
            f"kvtier watch: warning: anyone who can reach this machine at {host} sees the page",
            err=True,
        )
    if error_text := watched.look().error:
        typer.echo(f"kvtier watch: {error_text}; the page goes on asking", err=True)
    with server:
        typer.echo(f"kvtier shows {watched.url} at {server.url}")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("", err=True)
