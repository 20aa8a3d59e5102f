"""Settings of the HTTP server."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core.config import RecordConfig, parse_size, setting
from kvtier.core.errors import ConfigError

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")
"""Pattern of the header Origin: scheme, host and port in lower case, and no slash at the end."""


@dataclass(frozen=True)
class ServerConfig(RecordConfig):
    """Settings of the server: address, access, and limits per request."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port; 0 takes any free one.")
    api_key: str | Sequence[str] | None = setting(
        None,
        "Key that clients must send. Better given as KVTIER_API_KEY in the environment (several "
        "keys separated by blanks), where other users of the machine never see it.",
        shown="none",
        is_secret=True,
    )
    control_key: str | None = setting(
        None,
        "Key of the routes that look up, prefetch, pin and delete prompts; without one there are "
        "none. Better given as KVTIER_CONTROL_KEY in the environment.",
        shown="none",
        is_secret=True,
    )
    metrics_open: bool = setting(False, "Serve /metrics without a key, like /health.")
    cors_origin: Sequence[str] | None = setting(
        None,
        "Origin whose pages may send requests from a browser, like https://chat.example; * for "
        "every page.",
        shown="none",
    )
    ssl_certfile: str | None = setting(
        None,
        "Certificate in PEM, to serve HTTPS. It is read again when it changes.",
        shown="none",
    )
    ssl_keyfile: str | None = setting(
        None, "The certificate's key in PEM, if it is in another file.", shown="none"
    )
    served_model_name: str | None = setting(None, "The model's name in the API.")
    max_body_bytes: str | int = setting("8MiB", 'Longest request body: "8MiB", or bytes.')
    max_connections: int = setting(
        1024,
        "Most open connections; some more are reserved for /health, /metrics and the live page.",
    )
    header_timeout_s: float = setting(
        10.0, "Timeout of a connection for a complete request header, in seconds."
    )
    body_timeout_s: float = setting(30.0, "Timeout for a request's body, in seconds.")
    write_timeout_s: float = setting(
        60.0, "Timeout of a client that does not read its answer, in seconds."
    )
    max_choices: int = 64
    """Maximum of prompts times ``n`` of one HTTP request."""
    default_chat_tokens: int = 1024
    """Default of max_tokens in chats; less if the context has less room."""
    shutdown_grace_s: float = setting(
        30.0, "Seconds for which requests in flight may continue after SIGTERM."
    )
    traces: bool = setting(
        False,
        "Send spans of requests to the endpoint in OpenTelemetry's environment variables "
        "(OTEL_EXPORTER_OTLP_ENDPOINT).",
    )

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
        parse_size(self.record_max_bytes, "record_max_bytes")
        if parse_size(self.max_body_bytes, "max_body_bytes") < 1:
            raise ConfigError(f"max_body_bytes: {self.max_body_bytes} is below 1")
        for name in ("max_connections", "max_choices", "default_chat_tokens"):
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
        from kvtier.observe.live.client import check_api_key  # help needs no HTTP client

        if self.api_key is not None and not self.api_keys:
            raise ConfigError("api_key: there is no key; set one, or leave the option out")
        control_keys = () if self.control_key is None else (self.control_key,)
        for name, keys in (("api_key", self.api_keys), ("control_key", control_keys)):
            for key in keys:
                if not key.strip():
                    raise ConfigError(f"{name}: the key is empty; set one, or leave the option out")
                check_api_key(key, name)
