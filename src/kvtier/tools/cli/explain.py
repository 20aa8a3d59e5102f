"""``kvtier explain``: ask a running server where each part of a prompt's KV came from, and why."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from kvtier.core.errors import ConfigError
from kvtier.core.system.user_paths import user_path
from kvtier.tools.cli.api_keys import ApiKey, take_key
from kvtier.tools.cli.output import AsJson

STDIN = "-"


def explain(
    url: Annotated[str, typer.Argument(help="Address of kvtier serve: http://127.0.0.1:8000")],
    prompt_file: Annotated[
        str, typer.Option(help="The prompt, as text in UTF-8; - for stdin.")
    ] = STDIN,
    salt: Annotated[str, typer.Option(help="The tenant's cache_salt.", show_default="none")] = "",
    api_key: ApiKey = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, max=86400.0, help="Seconds to wait for the answer.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Send a prompt, and show where each part of its KV came from and which plans were compared.

    The prompt is an ordinary request for one token: uncached parts are computed, and cached
    afterwards.
    """
    from rich.console import Console

    from kvtier.tools.cli.explained import show
    from kvtier.tools.cli.explainer import Explainer

    prompt = _read(prompt_file)
    server = Explainer(url, take_key(api_key), timeout_s)
    model = server.model()
    found = server.explain(model, prompt, salt)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        show(found, f"{model} at {server.url}", Console(highlight=False, markup=False, emoji=False))


def _read(name: str) -> str:
    content = sys.stdin.buffer.read() if name == STDIN else user_path(name).read_bytes()
    try:
        prompt = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt_file: byte {error.start} is not UTF-8; give text") from error
    if not prompt:
        raise ConfigError("prompt_file: the prompt is empty; give at least one word")
    return prompt
