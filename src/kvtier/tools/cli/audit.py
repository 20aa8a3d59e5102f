"""``kvtier audit``: a running server computes a part of each prompt's cached KV again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.core.errors import ConfigError
from kvtier.tools.cli.api_keys import ApiKey, take_key
from kvtier.tools.cli.explain import Salt, ServeUrl, Timeout, ask, explanation, model_of
from kvtier.tools.cli.output import AsJson, print_json

NOT_AUDITED = "not audited"


def audit(
    url: ServeUrl,
    prompts: Annotated[
        Path,
        typer.Argument(
            help="Prompts: a JSON object per line with prompt or messages (or a body that has one, "
            "as in OpenAI's batch files), or one prompt as plain text."
        ),
    ],
    num: Annotated[int, typer.Option(min=1, help="Most prompts that are sent.")] = 100,
    salt: Salt = "",
    api_key: ApiKey = None,
    timeout_s: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Send prompts. For each, the server computes a part of its cached KV again and compares both.

    Each prompt is a request for one token, and is sent twice if it was not cached. The server needs
    no setting for it. While it has other requests it does not audit. Exits with 1 after any
    difference.
    """
    from kvtier.observe.live.client import server_url

    server, key = server_url(url), take_key(api_key)
    model = model_of(server, key, timeout_s)
    outcomes: Counter[str] = Counter()
    for body in _bodies(prompts, num):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        body |= {"model": model, "max_tokens": 1, "temperature": 0}
        body |= {"cache_salt": salt} if salt else {}
        found: dict[str, Any] = {}
        for _ in range(2):
            found = explanation(server, ask(server, path, key, timeout_s, body, "audit"))
            if found["reused_tokens"]:
                break
        outcomes[_outcome(found["notes"])] += 1
    if as_json:
        print_json({"prompts": outcomes.total(), "outcomes": dict(outcomes)})
    else:
        parts = (f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
        typer.echo(f"{model} at {server}: {outcomes.total()} prompts: " + ", ".join(parts))
    if outcomes["different"]:
        raise typer.Exit(1)


def _outcome(notes: list[str]) -> str:
    """Return the outcome of an audit from the sentences of an explanation."""
    from kvtier.cache.audit import COMPARED

    outcomes = (note.rpartition(f"{COMPARED}: ")[2] for note in notes if COMPARED in note)
    return next(outcomes, NOT_AUDITED)


def _bodies(path: Path, num: int) -> Iterator[dict[str, Any]]:
    """Yield the prompt of each line, as a part of a request."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; give text") from error
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise ConfigError(f"{path}: there is no prompt in it")
    if not lines[0].lstrip().startswith("{"):
        yield {"prompt": text}
        return
    for number, line in enumerate(lines[:num], 1):
        try:
            found = json.loads(line)
            found = found.get("body", found)
            (name,) = [name for name in ("prompt", "messages") if name in found]
        except (ValueError, RecursionError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{path}: line {number} is no JSON object with either prompt or messages"
            ) from error
        yield {name: found[name]}
