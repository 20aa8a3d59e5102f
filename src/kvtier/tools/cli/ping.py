"""``kvtier ping`` and ``kvtier describe``: check that a server answers, and show what it serves."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.core.errors import ConfigError, printable
from kvtier.tools.cli.api_keys import ApiKey, take_key
from kvtier.tools.cli.output import AsJson, print_json

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SHOWN = 200
"""Most characters of a name, and most models, that are read from a server's answer."""
TIMEOUT_S = 5.0

Url = Annotated[str, typer.Argument(help="Address of a server: http://127.0.0.1:8000")]
Timeout = Annotated[
    float, typer.Option(min=0.1, max=3600.0, help="Seconds to wait for each answer.")
]


def ping(
    url: Url, api_key: ApiKey = None, timeout_s: Timeout = TIMEOUT_S, as_json: AsJson = False
) -> None:
    """Check that a server is healthy, and show how long its answer took.

    Exits with 2 if it does not answer, or reports that it is not healthy.
    """
    from kvtier.observe.live.client import RefusedError, fetch, server_url

    server, key = server_url(url), take_key(api_key)
    began = time.perf_counter()
    try:
        fetch(f"{server}/health", timeout_s, {}, api_key=key)
    except RefusedError as error:
        if error.code != 404:
            raise
        began = time.perf_counter()
        fetch(f"{server}/v1/models", timeout_s, {}, api_key=key)
    seconds = time.perf_counter() - began
    if as_json:
        typer.echo(json.dumps({"url": server, "seconds": round(seconds, 6)}))
    else:
        typer.echo(f"{server} answers in {1000 * seconds:.1f} ms")


def describe(
    url: Url, api_key: ApiKey = None, timeout_s: Timeout = TIMEOUT_S, as_json: AsJson = False
) -> None:
    """Show what a server serves: models, engine, version, requests, and how full its tiers are.

    Works with kvtier serve, vLLM and SGLang. Facts that a server does not report are left out.
    """
    from kvtier.observe.live.client import server_url
    from kvtier.observe.live.scrape import WatchedEngine

    server, key = server_url(url), take_key(api_key)
    models = models_of(server, key, timeout_s)
    seen = WatchedEngine.at(server, key).look()
    picture: Mapping[str, Any] = seen.picture or {}
    found: dict[str, Any] = {
        "url": server,
        "models": models,
        "engine": picture.get("engine"),
        "version": _version(server, key, timeout_s),
        "requests": {
            name: picture.get("requests", {}).get(name) for name in ("running", "waiting")
        },
        "tiers": [
            {"name": each["name"], "fill": each["fill"]} for each in picture.get("tiers", ())
        ],
        "note": seen.error,
    }
    if as_json:
        print_json(found)
        return
    for line in _lines(found):
        typer.echo(printable(line))


def models_of(server: str, key: str | None, timeout_s: float) -> list[dict[str, object]]:
    """Return name and maximum length of each model; at least one.

    Raises:
        ConfigError: the server reports no models.
    """
    try:
        first, *rest = _json(f"{server}/v1/models", key, timeout_s)["data"][:MAX_SHOWN]
        return [
            {"name": str(each["id"])[:MAX_SHOWN], "max_tokens": _length(each)}
            for each in (first, *rest)
        ]
    except (ValueError, RecursionError, LookupError, TypeError):
        raise ConfigError(f"url: {server} answers, but is no server of models") from None


def _length(model: Mapping[str, object]) -> int | None:
    length = model.get("max_model_len")
    return length if isinstance(length, int) else None


def _version(server: str, key: str | None, timeout_s: float) -> str | None:
    """Return the server's ``/version``; None if there is none."""
    from kvtier.observe.live.client import NoAnswerError, RefusedError

    try:
        return str(_json(f"{server}/version", key, timeout_s)["version"])[:MAX_SHOWN]
    except (NoAnswerError, RefusedError, ValueError, RecursionError, LookupError, TypeError):
        return None


def _json(url: str, key: str | None, timeout_s: float) -> Any:
    from kvtier.observe.live.client import fetch

    return json.loads(fetch(url, timeout_s, {"Accept": "application/json"}, api_key=key))


def _lines(found: Mapping[str, Any]) -> list[str]:
    version = f" {found['version']}" if found["version"] else ""
    lines = [f"{found['url']}: {found['engine'] or 'an engine that is not known'}{version}"]
    for each in found["models"]:
        length = f", up to {each['max_tokens']:,} tokens" if each["max_tokens"] else ""
        lines.append(f"model: {each['name']}{length}")
    requests = found["requests"]
    if requests["running"] is not None:
        waiting = requests["waiting"] or 0
        lines.append(f"requests: {requests['running']:.0f} running, {waiting:.0f} waiting")
    for tier in found["tiers"]:
        fill = "" if tier["fill"] is None else f": {tier['fill']:.0%} in use"
        lines.append(f"tier: {tier['name']}{fill}")
    return [*lines, *([f"metrics: {found['note']}"] if found["note"] else [])]
