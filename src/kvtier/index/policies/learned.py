"""Eviction policies that only the native core has, and the one among them that learns."""

from __future__ import annotations

from kvtier.index.policies.lru import LruPolicy


class NativePolicy(LruPolicy):
    """Names an eviction policy of the native core that is told of requests.

    The native index runs the policy called ``native_name``. The index in Python, which is used
    where the core was not built, runs LRU in its place.
    """

    knows_prompts = True


class RunsPolicy(NativePolicy):
    """kvtier's learned policy: it learns which prompts are used again, and when."""

    native_name = "runs"
