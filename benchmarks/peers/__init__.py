"""Other projects' disk caches, each driven through its own classes in its own environment.

A contestant is a module here with a function ``open_store``, and the environment that it needs.
`make peers` installs the environments. Nothing here is imported by kvtier.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".peers"
OURS = "kvtier"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A disk cache and how it is set up."""

    name: str
    peer: str
    """Owner: ``kvtier`` or the name of an environment."""
    module: str
    options: dict[str, object] = field(default_factory=dict)
    environment: str | None = None
    """Environment in which it runs, if not that of ``peer``."""

    @property
    def python(self) -> Path:
        """Interpreter of its environment."""
        if self.peer == OURS and self.environment is None:
            return Path(sys.executable)
        return ENVIRONMENTS / (self.environment or self.peer) / "bin" / "python"

    @property
    def target(self) -> str:
        """Return the make target of the environment."""
        return f"peers-{self.environment or self.peer}"


CONTESTANTS = (
    Contestant("kvtier", OURS, "kvtier_disk", {"verify": "always"}),
    Contestant("kvtier, unverified", OURS, "kvtier_disk", {"verify": "off"}),
    Contestant("sglang file", "sglang", "sglang_file", {"num_threads": 1}),
    Contestant("sglang file, 8 threads", "sglang", "sglang_file", {"num_threads": 8}),
    Contestant("lmcache local disk", "lmcache", "lmcache_local_disk", {"direct": False}),
    Contestant("lmcache local disk, direct", "lmcache", "lmcache_local_disk", {"direct": True}),
    Contestant("lmcache fs_native, direct", "lmcache", "lmcache_fs_native", {"direct": True}),
    Contestant("vllm fs, 1 request", "vllm", "vllm_fs", {"num_jobs": 1}),
    Contestant("vllm fs, 16 requests", "vllm", "vllm_fs", {"num_jobs": 16}),
)
