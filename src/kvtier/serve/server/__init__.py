"""OpenAI-compatible server on top of the embedded engine.

Each name is imported on first use: settings can be checked, and a port bound, before torch and the
web framework are imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.serve.server.app import make_app
    from kvtier.serve.server.config import ServerConfig
    from kvtier.serve.server.listener import bind, is_loopback
    from kvtier.serve.server.run import HttpServer
    from kvtier.serve.server.service import Service
    from kvtier.serve.server.tls import open_certificate
else:
    _MODULES = {
        "HttpServer": "run",
        "ServerConfig": "config",
        "Service": "service",
        "bind": "listener",
        "is_loopback": "listener",
        "make_app": "app",
        "open_certificate": "tls",
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = [
    "HttpServer",
    "ServerConfig",
    "Service",
    "bind",
    "is_loopback",
    "make_app",
    "open_certificate",
]
