"""Options that had another name: whoever still gives the old one is told the new one."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from kvtier.cli.failure import fail

RENAMED = {
    "serve": {
        "--max-body": "--max-body-bytes",
        "--header-timeout": "--header-timeout-s",
        "--body-timeout": "--body-timeout-s",
        "--write-timeout": "--write-timeout-s",
        "--shutdown-grace": "--shutdown-grace-s",
        "--prefetch": "--prefetch-policy",
        "--prefetch-timeout": "--prefetch-timeout-s",
    },
    "bench serve": {
        "--prompts": "--ttft-prompts",
        "--disk": "--disk-path",
        "--disk-throttle": "--disk-bytes-per-s",
    },
    "vllm-args": {"--host": "--host-capacity", "--disk": "--disk-path"},
}
"""By command, old to new."""


def telling(command: str) -> type[TyperCommand]:
    """The class of ``command``, which refuses old names of its options."""
    renamed = RENAMED[command]

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            for option in (each.split("=")[0] for each in args):
                if option in renamed:
                    fail(command, f"{option} is called {renamed[option]}")
            return super().parse_args(ctx, args)

    return Command
