"""The OpenAI-compatible server on top of the embedded engine."""

from __future__ import annotations

from kvtier.server.app import make_app
from kvtier.server.config import ServerConfig
from kvtier.server.doorman import raise_descriptor_limit
from kvtier.server.log_rate import LogRate
from kvtier.server.run import HttpServer, bind, is_loopback
from kvtier.server.service import Service

__all__ = [
    "HttpServer",
    "LogRate",
    "ServerConfig",
    "Service",
    "bind",
    "is_loopback",
    "make_app",
    "raise_descriptor_limit",
]
