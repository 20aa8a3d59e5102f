"""Policies that others have: blocks in queues. The sources of each are named in
``native/policy/list_policies.hpp`` and ``lfuda.hpp``.

A use of a block is a request that asks for it. The end of a prompt leaves before its beginning, and
everything is let in.
"""

from __future__ import annotations

from kvtier.index.policies.runs import PromptPolicy


class ArcPolicy(PromptPolicy):
    """ARC: what was asked for once, and what was more often, each least recently used first; what
    is missed again says how much room each has."""

    native_name = "arc"


class S3FifoPolicy(PromptPolicy):
    """S3-FIFO: first in, first out; a tenth of the room is for what is new, and what is asked for
    twice there, or again soon after it has left, comes to the rest."""

    native_name = "s3fifo"


class LfudaPolicy(PromptPolicy):
    """LFU with ageing: least frequently used first, uses counting less the longer they are ago."""

    native_name = "lfuda"


class SievePolicy(PromptPolicy):
    """SIEVE: a hand goes from the oldest to the newest, and takes what was not used since it was
    there last."""

    native_name = "sieve"
