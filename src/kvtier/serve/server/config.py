"""Settings of the HTTP server."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.core.errors import ConfigError
from kvtier.observe.live.client import check_api_key

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")
"""Pattern of the header Origin: scheme, host and port in lower case, and no slash at the end."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the server: address, access, and limits per request."""

    host: str = "127.0.0.1"
    """Address or name to listen on."""
    port: int = 8000
    """TCP port; 0 takes any free one."""
    api_key: str | Sequence[str] | None = field(default=None, repr=False)
    """API key, or several, one of which clients must send as bearer token; None for open access."""
    control_key: str | None = field(default=None, repr=False)
    """Key of the routes that look up, prefetch, pin and delete; None for no such routes."""
    metrics_open: bool = False
    """Whether ``/metrics`` is served without a key, like ``/health``."""
    cors_origin: Sequence[str] | None = None
    """Origins whose pages may send requests from a browser, like "https://chat.example"; "*" for
    every page. None for no other origin than the server's own."""
    ssl_certfile: str | None = None
    """Certificate chain in PEM. If set, the server speaks only HTTPS."""
    ssl_keyfile: str | None = None
    """Private key in PEM; None if it is in the certificate's file."""
    served_model_name: str | None = None
    """Name of the model in the API. Default: the engine's."""
    max_body_bytes: int = 8 << 20
    """Maximum size of a request body."""
    max_connections: int = 1024
    """Open connections; fewer if the open-file limit is lower. A few more are reserved for
    ``/health``, ``/metrics`` and the live page."""
    header_timeout_s: float = 10.0
    """Time limit for a connection to send a complete request header."""
    body_timeout_s: float = 30.0
    """Time limit for a request's body to arrive."""
    write_timeout_s: float = 60.0
    """Longest time for which a client may leave its answer unread."""
    max_choices: int = 64
    """Maximum of prompts times ``n`` of one HTTP request."""
    default_chat_tokens: int = 1024
    """Default of max_tokens in chats; less if the context has less room."""
    shutdown_grace_s: float = 30.0
    """Longest time for requests in flight to finish after SIGTERM."""
    record: str = ""
    """File that requests are recorded to, as salted hashes, lengths and times; "" for none."""
    record_max_bytes: int = 1 << 30
    """Maximum size of the recording; the oldest requests are deleted."""

    traces: bool = False
    """Export spans as configured by OpenTelemetry's environment variables."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(
                f"port: {self.port} is no TCP port; use 1 to 65535, or 0 for a free one"
            )
        self._check_keys()
        for origin in self.cors_origin or ():
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin: {origin!r} is no origin; write it as a browser sends it: "
                    '"https://chat.example" or "http://localhost:3000", or "*" for every page'
                )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile: there is no certificate; give ssl_certfile, too")
        for name in ("max_body_bytes", "max_connections", "max_choices", "default_chat_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")
        for name in ("header_timeout_s", "body_timeout_s", "write_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name}: {getattr(self, name)} is no time to wait; give seconds above 0"
                )
        if not 0 <= self.shutdown_grace_s < math.inf:
            raise ConfigError(
                f"shutdown_grace_s: {self.shutdown_grace_s} is no number of seconds; give 0 or more"
            )

    @property
    def api_keys(self) -> tuple[str, ...]:
        """All keys; empty for open access."""
        if self.api_key is None:
            return ()
        return (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key)

    def _check_keys(self) -> None:
        """Check the keys. No message may contain a key."""
        if self.api_key is not None and not self.api_keys:
            raise ConfigError("api_key: there is no key; set one, or leave the option out")
        control_keys = () if self.control_key is None else (self.control_key,)
        for name, keys in (("api_key", self.api_keys), ("control_key", control_keys)):
            for key in keys:
                if not key.strip():
                    raise ConfigError(f"{name}: the key is empty; set one, or leave the option out")
                check_api_key(key, name)
