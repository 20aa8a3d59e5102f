"""One row per request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """Record of what the cache did for one request, completed when its lease ends.

    hit_blocks: reused blocks by the tier they were found in. load_bytes, load_s: copied to the
    device for it, and from the start of the copy until ready. arrivals: which blocks of the prompt
    had come when, in seconds from the same start.
    """

    num_asked_blocks: int = 0
    hit_blocks: dict[str, int] = field(default_factory=dict)
    load_bytes: int = 0
    load_s: float = 0.0
    arrivals: list[tuple[range, float]] = field(default_factory=list)
