"""Value of hits: computing time saved, less the time for loading."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.tools.replay.assumptions import Machine
from kvtier.tools.replay.trace import Floats, Ints, Trace


@dataclass(frozen=True, eq=False)
class Savings:
    """Accelerator seconds and tokens saved per request, float64 and int64 [num_requests].

    by_tier: total tokens from device, host and disk.
    """

    seconds: Floats
    tokens: Ints
    by_tier: tuple[int, int, int]

    @property
    def total_s(self) -> float:
        return float(self.seconds.sum())


class Prompts:
    """Requests of a trace as prompts of tokens."""

    def __init__(self, trace: Trace, machine: Machine) -> None:
        in_blocks = trace.lengths * trace.block_tokens
        known = trace.input_tokens > 0
        self.tokens = np.where(known, trace.input_tokens, in_blocks)
        self._block_tokens = trace.block_tokens
        self._machine = machine

    def computing_s(self, tokens: Ints) -> Floats:
        """Return the seconds to compute the first ``tokens`` of each prompt."""
        prefill = self._machine.prefill
        counts = tokens.astype(np.float64)
        found: Floats = prefill.token_s * counts + prefill.pair_s * counts * counts / 2
        return found

    @property
    def all_s(self) -> float:
        """Seconds to compute all prompts without reuse."""
        return float(self.computing_s(self.tokens).sum())

    def reused(self, blocks: Ints) -> Ints:
        """Return the tokens in each request's first blocks, without the prompt's last token."""
        found: Ints = np.minimum(blocks * self._block_tokens, np.maximum(self.tokens - 1, 0))
        return found

    def savings(self, device: Ints, host: Ints, disk: Ints) -> Savings:
        """Return the savings of blocks found by tier, each int64 [num_requests].

        Each block is read from the fastest tier that has it. Further blocks of a slower tier are
        loaded if that takes less time than computing them, as kvtier's planner decides: all or
        none, since later tokens take longer to compute but not to load. A load counts as if the
        accelerator waited for it.
        """
        machine = self._machine
        ends = [self.reused(device)]
        for blocks in (host, disk):
            ends.append(np.maximum(ends[-1], self.reused(blocks)))
        gained = [self.computing_s(end) for end in ends]
        loading_s = [
            (end - start) * (machine.bytes_per_token / rate)
            for start, end, rate in zip(
                ends, ends[1:], (machine.host_bytes_per_s, self._disk_rate), strict=False
            )
        ]
        host_s = gained[1] - gained[0] - loading_s[0]
        both_s = gained[2] - gained[0] - loading_s[0] - loading_s[1]
        takes_disk = (both_s > np.maximum(host_s, 0)) & (ends[2] > ends[1])
        takes_host = takes_disk | (host_s > 0)
        from_host = np.where(takes_host, ends[1] - ends[0], 0)
        from_disk = np.where(takes_disk, ends[2] - ends[1], 0)
        return Savings(
            gained[0] + np.where(takes_disk, both_s, np.where(takes_host, host_s, 0.0)),
            ends[0] + from_host + from_disk,
            (int(ends[0].sum()), int(from_host.sum()), int(from_disk.sum())),
        )

    @property
    def _disk_rate(self) -> float:
        """Rate of loads from disk, which pass through host memory: the slower of both rates."""
        return min(self._machine.disk_bytes_per_s, self._machine.host_bytes_per_s)
