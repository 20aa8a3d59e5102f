"""``kvtier watch``: serve the live page for an engine that has none."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.cli.api_keys import KEY_VARIABLE, take_key
from kvtier.cli.failure import fail

URL = "http://127.0.0.1:8000"


def watch(
    url: Annotated[str, typer.Argument(help="Address of the engine, or of its metrics.")] = URL,
    host: Annotated[str, typer.Option(help="Address to serve the page at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes any free one.")] = 8500,
    api_key: Annotated[
        str | None,
        typer.Option(help=f"Key of the engine; better given as {KEY_VARIABLE}."),
    ] = None,
) -> None:
    """Serve a live page of the cache of vLLM, SGLang, or a kvtier server elsewhere.

    A kvtier server has the page itself, at /.
    """
    from kvtier.live.local import LOCAL_HOSTS, LocalServer
    from kvtier.live.scrape import WatchedEngine

    watched = WatchedEngine(url, take_key(api_key))
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
