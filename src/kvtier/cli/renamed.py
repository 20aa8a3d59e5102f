"""Old names of options. Whoever gives one is told the new one."""

from __future__ import annotations

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
