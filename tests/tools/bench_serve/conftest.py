"""The tests need the engine extra. Without it, none is collected."""

from __future__ import annotations

from importlib.util import find_spec

needed = ("torch", "transformers", "matplotlib", "jinja2")
collect_ignore_glob = ["test_*.py"] if any(find_spec(name) is None for name in needed) else []
