"""Clients of the control API: of a node over its Unix socket, of a server by its URL."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from http.client import HTTPException
from pathlib import Path
from typing import Any

from kvtier.core.errors import CacheError
from kvtier.node.config import control_socket
from kvtier.observe.live.client import (
    RefusedError,
    UnixConnection,
    check_api_key,
    fetch,
    server_url,
)

MAX_BYTES = 64 << 20
"""Most bytes of an answer."""


class JsonClient(ABC):
    """Requests to a control API."""

    def get(self, route: str) -> Any:
        """Return the answer to a query. Raises ``CacheError`` if there is none."""
        return self._request("GET", route, None)

    def post(self, route: str, **body: object) -> Any:
        """Return the answer to a request with a body. Raises ``CacheError`` if there is none."""
        return self._request("POST", route, json.dumps(body).encode())

    @abstractmethod
    def _request(self, method: str, route: str, body: bytes | None) -> Any:
        """Return the decoded answer."""


class ControlClient(JsonClient):
    """Requests to one node.

    socket_path: of the socket for engines. timeout_s: longest wait for an answer.
    """

    def __init__(self, socket_path: Path, timeout_s: float) -> None:
        self._socket, self._path = socket_path, control_socket(socket_path)
        self._timeout_s = timeout_s

    def _request(self, method: str, route: str, body: bytes | None) -> Any:
        connection = UnixConnection(self._path, self._timeout_s)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, route, body, headers)
            answer = connection.getresponse()
            content = answer.read(MAX_BYTES)
            told = json.loads(content)
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, FileNotFoundError):
                raise CacheError(
                    f"there is no node at {self._socket}; start one with kvtier node run, or name "
                    "the path of its socket"
                ) from None
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise CacheError(
                f"{self._path} does not answer: {reason}; start the node with kvtier node run"
            ) from None
        finally:
            connection.close()
        if answer.status != 200:
            raise CacheError(_reason(told))
        return told


def _reason(told: Any) -> str:
    """Return the reason of a refusal in one sentence."""
    if isinstance(told, dict) and "error" in told:
        return str(told["error"])
    return f"the node refuses the request: {json.dumps(told)[:500]}"


class ServerControlClient(JsonClient):
    """Requests to the control of one server, as ``ControlClient`` makes them to a node.

    url: of the server. key: of its control. timeout_s: longest wait for an answer.

    Raises ``ConfigError`` for a key that can't be sent.
    """

    def __init__(self, url: str, key: str | None, timeout_s: float) -> None:
        self._url = server_url(url)
        self._key = key if key is None else check_api_key(key, "control_key")
        self._timeout_s = timeout_s

    def _request(self, method: str, route: str, body: bytes | None) -> Any:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        url = f"{self._url}{route}"
        try:
            return json.loads(fetch(url, self._timeout_s, headers, body, self._key))
        except RefusedError as error:
            raise CacheError(f"{error}: {error.said or 'has it a control key?'}") from None
        except ValueError:
            raise CacheError(f"{url} answers, but with no JSON") from None
