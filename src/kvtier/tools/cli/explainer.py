"""HTTP client of ``kvtier explain``: sends a prompt to a server and returns its explanation."""

from __future__ import annotations

import json
from typing import Any, cast

from kvtier.core.errors import ConfigError
from kvtier.observe.live.client import MAX_SAID, NoAnswerError, RefusedError, fetch, server_url
from kvtier.tools.cli.explained import is_explanation

HEADER = "X-KVTier-Explain"


class Explainer:
    """Client of a kvtier server that explains prompts."""

    def __init__(self, url: str, key: str | None, timeout_s: float) -> None:
        self.url = server_url(url)
        self._key, self._timeout_s = key, timeout_s

    def model(self) -> str:
        """Return the name of the server's first model."""
        try:
            return str(self._ask("/v1/models")["data"][0]["id"])[:MAX_SAID]
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"url: {self.url} answers, but is no server of models") from error

    def explain(self, model: str, prompt: str, salt: str) -> dict[str, object]:
        """Return where each part of ``prompt`` came from, in the shape that ``show`` needs."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = self._ask("/v1/completions", {**body, **({"cache_salt": salt} if salt else {})})
        try:
            (found,) = answer["usage"]["kvtier"]
        except (KeyError, TypeError, ValueError):
            found = None
        if not is_explanation(found):
            raise ConfigError(
                f"url: {self.url} answers, but explains nothing; it is no kvtier serve, or an older"
                " one"
            )
        return cast("dict[str, object]", found)

    def _ask(self, path: str, body: dict[str, object] | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", HEADER: "1"}
        try:
            return json.loads(fetch(self.url + path, self._timeout_s, headers, content, self._key))
        except RefusedError as error:
            raise ConfigError(
                f"url: {self.url} refuses: {error.said or f'status {error.code}'}"
            ) from error
        except NoAnswerError as error:
            raise ConfigError(f"url: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"url: {self.url} answers, but not in JSON") from error
