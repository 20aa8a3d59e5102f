"""One row per request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """What the cache did for one request. Filled while it runs, recorded when its lease ends.

    num_tokens: the prompt. hit_blocks: reused blocks by the tier they were found in.
    load_bytes, load_s: copied to the device for it, and from the start of the copy until ready.
    planned_load_s, planned_recompute_s: what the planner expected. num_committed_blocks: blocks it
    added to the cache. load_failed: some load failed or came too late, and was recomputed.
    """

    num_tokens: int = 0
    num_asked_blocks: int = 0
    hit_blocks: dict[str, int] = field(default_factory=dict)
    load_bytes: int = 0
    load_s: float = 0.0
    planned_load_s: float = 0.0
    planned_recompute_s: float = 0.0
    num_committed_blocks: int = 0
    load_failed: bool = False

    @property
    def num_hit_blocks(self) -> int:
        return sum(self.hit_blocks.values())
