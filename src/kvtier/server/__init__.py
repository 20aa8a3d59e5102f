"""The OpenAI-compatible server on top of the embedded engine."""

from __future__ import annotations

from kvtier.server.app import make_app
from kvtier.server.config import ServerConfig
from kvtier.server.doorman import raise_descriptor_limit
from kvtier.server.run import HttpServer, bind, is_loopback
from kvtier.server.service import Service
from kvtier.server.tls import open_certificate

__all__ = [
    "HttpServer",
    "ServerConfig",
    "Service",
    "bind",
    "is_loopback",
    "make_app",
    "open_certificate",
    "raise_descriptor_limit",
]
