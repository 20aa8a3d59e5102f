"""Lets SGLang's `file` read on a CPU: its pages on the way are page-locked, which no CPU can do."""

from __future__ import annotations


def register() -> None:
    """SGLang calls it in each of its processes."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    begin = MHATokenToKVPoolHost.__init__

    def pageable(self: MHATokenToKVPoolHost, *args: object, **options: object) -> None:
        begin(self, *args, **options)
        self.pin_memory = False

    MHATokenToKVPoolHost.__init__ = pageable
