"""Plug-in that lets SGLang's `file` run on a CPU, where its staging pages can't be page-locked."""

from __future__ import annotations


def register() -> None:
    """Turn page-locking off. SGLang calls this in each of its processes."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    begin = MHATokenToKVPoolHost.__init__

    def pageable(self: MHATokenToKVPoolHost, *args: object, **options: object) -> None:
        begin(self, *args, **options)
        self.pin_memory = False

    MHATokenToKVPoolHost.__init__ = pageable
