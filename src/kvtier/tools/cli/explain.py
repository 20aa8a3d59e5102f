"""``kvtier explain``: ask a running server where each part of a prompt's KV came from, and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any, cast

import typer

from kvtier.core.errors import ConfigError
from kvtier.core.system.user_paths import user_path
from kvtier.tools.cli.api_keys import ApiKey, take_key
from kvtier.tools.cli.output import AsJson, print_json

STDIN = "-"
HEADER = "X-KVTier-Explain"

ServeUrl = Annotated[str, typer.Argument(help="Address of kvtier serve: http://127.0.0.1:8000")]
Salt = Annotated[str, typer.Option(help="The tenant's cache_salt.", show_default="none")]
Timeout = Annotated[
    float, typer.Option(min=0.1, max=86400.0, help="Seconds to wait for each answer.")
]


def explain(
    url: ServeUrl,
    prompt_file: Annotated[
        str, typer.Option(help="The prompt, as text in UTF-8; - for stdin.")
    ] = STDIN,
    salt: Salt = "",
    api_key: ApiKey = None,
    timeout_s: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Send a prompt, and show where each part of its KV came from and which plans were compared.

    The prompt is an ordinary request for one token: uncached parts are computed, and cached
    afterwards.
    """
    from rich.console import Console

    from kvtier.observe.live.client import server_url
    from kvtier.tools.cli.explained import show

    prompt = _read(prompt_file)
    server, key = server_url(url), take_key(api_key)
    model = model_of(server, key, timeout_s)
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    body |= {"cache_salt": salt} if salt else {}
    found = explanation(server, ask(server, "/v1/completions", key, timeout_s, body))
    if as_json:
        print_json(found)
    else:
        show(found, f"{model} at {server}", Console(highlight=False, markup=False, emoji=False))


def _read(name: str) -> str:
    content = sys.stdin.buffer.read() if name == STDIN else user_path(name).read_bytes()
    try:
        prompt = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt_file: byte {error.start} is not UTF-8; give text") from error
    if not prompt:
        raise ConfigError("prompt_file: the prompt is empty; give at least one word")
    return prompt


def model_of(server: str, key: str | None, timeout_s: float) -> str:
    """Return the name of the first model that a server has."""
    from kvtier.observe.live.client import MAX_SAID

    try:
        return str(ask(server, "/v1/models", key, timeout_s)["data"][0]["id"])[:MAX_SAID]
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"url: {server} answers, but is no server of models") from error


def explanation(server: str, answer: Any) -> dict[str, object]:
    """Return the explanation in an answer, in the shape that ``show`` needs."""
    from kvtier.tools.cli.explained import is_explanation

    try:
        (found,) = answer["usage"]["kvtier"]
    except (KeyError, TypeError, ValueError):
        found = None
    if not is_explanation(found):
        raise ConfigError(
            f"url: {server} answers, but explains nothing; it is no kvtier serve, or an older one"
        )
    return cast("dict[str, object]", found)


def ask(
    server: str,
    path: str,
    key: str | None,
    timeout_s: float,
    body: Mapping[str, object] | None = None,
    header: str = "1",
) -> Any:
    """Return the answer of ``kvtier serve``. header: "1" to explain it, "audit" to audit it, too.

    Raises ``ConfigError`` if there is none.
    """
    from kvtier.observe.live.client import NoAnswerError, RefusedError, fetch

    content = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", HEADER: header}
    try:
        return json.loads(fetch(server + path, timeout_s, headers, content, key))
    except RefusedError as error:
        raise ConfigError(
            f"url: {server} refuses: {error.said or f'status {error.code}'}"
        ) from error
    except NoAnswerError as error:
        raise ConfigError(f"url: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"url: {server} answers, but not in JSON") from error
