"""``kvtier explain``: ask a running server where a prompt comes from, and what was compared."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, cast

import typer

from kvtier.cli.failure import fail
from kvtier.errors import CacheError, ConfigError

KEY_VARIABLE = "KVTIER_API_KEY"
HEADER = "X-KVTier-Explain"
STDIN = "-"


def explain(
    url: Annotated[str, typer.Argument(help="Of kvtier serve: http://127.0.0.1:8000")],
    prompt_file: Annotated[
        str, typer.Option(help="The prompt, as text in UTF-8; - for stdin.")
    ] = STDIN,
    salt: Annotated[str, typer.Option(help="The tenant's cache_salt.", show_default="none")] = "",
    api_key: Annotated[
        str | None,
        typer.Option(help=f"Of the server; better given as {KEY_VARIABLE} in the environment."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Send a prompt, and say where each part of it came from and what else was compared.

    The prompt is a request as any other, for one token: what was not cached is computed, and
    cached from then on.
    """
    from rich.console import Console

    from kvtier.cli.explained import show

    try:
        prompt = _read(prompt_file)
        key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE)
        server = _Server(url, key, timeout_s)
        model = server.model()
        found = server.explain(model, prompt, salt)
    except (CacheError, OSError) as error:
        fail("explain", error)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        show(found, f"{model} at {server.url}", Console(highlight=False))


def _read(name: str) -> str:
    content = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    try:
        prompt = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt_file: byte {error.start} is not UTF-8; give text") from error
    if not prompt:
        raise ConfigError("prompt_file: the prompt is empty; give at least one word")
    return prompt


class _Server:
    def __init__(self, url: str, key: str | None, timeout_s: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url: {url!r} is no URL; write for instance http://127.0.0.1:8000")
        self._headers = {"Content-Type": "application/json", HEADER: "1"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout_s = timeout_s

    def model(self) -> str:
        try:
            return str(self._ask("/v1/models")["data"][0]["id"])  # type: ignore[index]
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"url: {self.url} answers, but is no server of models") from error

    def explain(self, model: str, prompt: str, salt: str) -> dict[str, object]:
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = self._ask("/v1/completions", {**body, **({"cache_salt": salt} if salt else {})})
        try:
            (found,) = answer["usage"]["kvtier"]  # type: ignore[index]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"url: {self.url} answers, but explains nothing; it is no kvtier serve, or an older"
                " one"
            ) from error
        return cast("dict[str, object]", found)

    def _ask(self, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise ConfigError(f"url: {self.url} refuses: {_reason(error)}") from error
        except (urllib.error.URLError, TimeoutError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(f"url: {self.url} does not answer: {reason}") from error
        except ValueError as error:
            raise ConfigError(f"url: {self.url} answers, but not in JSON") from error
        return cast("dict[str, object]", found)


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
