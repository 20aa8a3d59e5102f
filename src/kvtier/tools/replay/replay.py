"""Run one replay, from files to a result. Start here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier.core.errors import ConfigError
from kvtier.index.policies.replayed import LRU
from kvtier.tools.replay.assumptions import Assumption, Machine
from kvtier.tools.replay.evidence import LEAST_REUSES, LEAST_TURNS, gather, rate_per_hour
from kvtier.tools.replay.policies import OPTIMUM, Replayer, ReplayHits, check_policies
from kvtier.tools.replay.result import HitPoint, ReplayResult, Setup, TraceFacts
from kvtier.tools.replay.savings import Prompts
from kvtier.tools.replay.segments import Segments, find_segments
from kvtier.tools.replay.sizing import SizeChoice, Sizing, usual_sizes
from kvtier.tools.replay.trace import Ints, Trace
from kvtier.tools.replay.traces import ReadOptions, read_traces
from kvtier.tools.report.progress import Progress

PER_MILLE = 1000
MAX_ACCELERATORS = 10_000


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a tier: bytes, or a share of the bytes of all distinct blocks of the trace."""

    num_bytes: int = 0
    share: float = 0.0

    def of(self, unique_bytes: int) -> int:
        return self.num_bytes or int(self.share * unique_bytes)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay.

    Attributes:
        paths: files of the trace.
        read: options of reading them.
        machine: figures from which savings are computed.
        assumptions: ``machine`` in words.
        policies: policies to replay. Sizes are recommended for the first one that is not the
            optimum.
        sizes: sizes of host memory and disk to evaluate; by default, powers of two.
        host_bytes, disk_bytes: tiers to evaluate in any case; 0 for none.
    """

    paths: tuple[Path, ...]
    read: ReadOptions
    machine: Machine
    assumptions: tuple[Assumption, ...]
    policies: tuple[str, ...] = (LRU, OPTIMUM)
    sizes: tuple[Size, ...] = ()
    host_bytes: int = 0
    disk_bytes: int = 0


def run_replay(options: ReplayOptions, progress: Progress, command: str = "") -> ReplayResult:
    """Read the traces, replay them, and evaluate the sizes. Raises ``ConfigError``."""
    check_policies(options.policies)
    done = _Steps(progress)
    progress.begin("read", PER_MILLE)
    trace = read_traces(options.paths, options.read, done)
    done(1, 1)
    done = _Steps(progress)
    progress.begin("find reuse", PER_MILLE)
    segments = find_segments(trace, done)
    _check_load(trace, options.machine)
    return _Replay(options, trace, segments, progress).result(command)


class _Replay:
    def __init__(
        self, options: ReplayOptions, trace: Trace, segments: Segments, progress: Progress
    ) -> None:
        self._options, self._trace, self._segments = options, trace, segments
        self._progress = progress
        self._replayer = Replayer(trace, segments)
        self._policy = next(name for name in options.policies if name != OPTIMUM)
        self._kept: dict[int, ReplayHits] = {}
        machine = options.machine
        self._block_bytes = trace.block_tokens * machine.bytes_per_token
        self._unique_bytes = segments.num_unique * self._block_bytes
        self._sizes = self._chosen_sizes()
        # Hits in the engine's own memory, which is assumed to be LRU.
        device = self._replayer.hits(LRU, machine.device_bytes // self._block_bytes).found
        self._num_supported = segments.num_unique // LEAST_TURNS
        self._sizing = Sizing(trace, machine, device, self._decisive, self._num_supported)
        self._device = device

    def _chosen_sizes(self) -> list[int]:
        options = self._options
        if not options.sizes:
            least = max(self._block_bytes, options.machine.device_bytes)
            return usual_sizes(self._unique_bytes, least)
        found = sorted({size.of(self._unique_bytes) for size in options.sizes})
        if found[0] < self._block_bytes:
            raise ConfigError(
                f"sizes: {found[0]:,} bytes hold no block: one takes {self._block_bytes:,} bytes "
                f"({self._trace.block_tokens} tokens)"
            )
        return found

    def _decisive(self, num_blocks: int) -> ReplayHits:
        """Return the hits under the policy for which sizes are recommended. Cached by size."""
        if num_blocks not in self._kept:
            self._kept[num_blocks] = self._replayer.hits(self._policy, num_blocks)
        return self._kept[num_blocks]

    def result(self, command: str) -> ReplayResult:
        options, trace, sizing = self._options, self._trace, self._sizing
        curves = self._curves()
        evidence = gather(trace, self._segments)
        judged = [size for size in self._sizes if size // self._block_bytes <= self._num_supported]
        host = sizing.host_curve(self._sizes)
        choice = None if evidence.weakness else sizing.choose(judged, judged)
        bought = None if choice is None else choice.host
        host_bytes = 0 if bought is None else bought.num_bytes
        disk = sizing.disk_curve([size for size in self._sizes if size > host_bytes], host_bytes)
        gained = None
        if choice is not None:
            gained = rate_per_hour(trace, choice.savings.seconds - sizing.without.seconds)
        return ReplayResult(
            command,
            self._facts(sizing.prompts),
            evidence,
            options.machine,
            options.assumptions,
            self._policy,
            curves,
            self._hit_point(self._unique_bytes, self._everything()),
            tuple(host),
            tuple(disk),
            choice,
            tuple(self._setups(choice)),
            gained,
        )

    def _curves(self) -> dict[str, tuple[HitPoint, ...]]:
        policies = self._options.policies
        self._progress.begin("replay", len(policies) * len(self._sizes))
        curves: dict[str, tuple[HitPoint, ...]] = {}
        for name in policies:
            points = []
            for num_bytes in self._sizes:
                num_blocks = num_bytes // self._block_bytes
                is_decisive = name == self._policy
                hits = (
                    self._decisive(num_blocks)
                    if is_decisive
                    else self._replayer.hits(name, num_blocks)
                )
                points.append(self._hit_point(num_bytes, hits.found))
                self._progress.advance(name)
            curves[name] = tuple(points)
        return curves

    def _hit_point(self, num_bytes: int, found: Ints) -> HitPoint:
        prompts = self._sizing.prompts
        saved_s = float(prompts.computing_s(prompts.reused(found)).sum())
        return HitPoint(
            num_bytes,
            num_bytes // self._block_bytes,
            float(found.sum() / self._trace.num_references),
            saved_s / prompts.all_s if prompts.all_s else 0.0,
        )

    def _everything(self) -> Ints:
        """Return the blocks of each request that any earlier one had."""
        segments = self._segments
        return segments.per_request(np.where(segments.is_reuse, segments.length, 0))

    def _setups(self, choice: SizeChoice | None) -> list[Setup]:
        options, sizing = self._options, self._sizing
        device_bytes = options.machine.device_bytes
        found = [Setup("as it is", device_bytes, 0, 0, sizing.without)]
        if options.host_bytes or options.disk_bytes:
            found.append(
                self._setup("asked for", options.host_bytes, options.disk_bytes),
            )
        bought = () if choice is None else (choice.host, choice.disk)
        if choice is not None and any(point is not None for point in bought):
            host, disk = (0 if point is None else point.num_bytes for point in bought)
            found.append(Setup("recommended", device_bytes, host, disk, choice.savings))
        return found

    def _setup(self, name: str, host_bytes: int, disk_bytes: int) -> Setup:
        host, disk = (
            self._decisive(size // self._block_bytes).found for size in (host_bytes, disk_bytes)
        )
        savings = self._sizing.prompts.savings(self._device, host, disk)
        return Setup(name, self._options.machine.device_bytes, host_bytes, disk_bytes, savings)

    def _facts(self, prompts: Prompts) -> TraceFacts:
        trace = self._trace
        return TraceFacts(
            tuple(path.name for path in self._options.paths),
            trace.num_requests,
            trace.num_references,
            self._segments.num_unique,
            trace.block_tokens,
            trace.window_s,
            int(prompts.tokens.sum()),
            prompts.all_s,
            trace.notes,
        )


def _check_load(trace: Trace, machine: Machine) -> None:
    """Raise ``ConfigError`` for prompts that no fleet could compute in the time of the trace."""
    computing_s = Prompts(trace, machine).all_s
    if trace.num_requests >= LEAST_REUSES and computing_s > MAX_ACCELERATORS * trace.window_s > 0:
        raise ConfigError(
            f"computing the prompts of the trace takes {computing_s:,.0f} s of an accelerator, and "
            f"they come within {trace.window_s:,.3g} s: {MAX_ACCELERATORS:,} accelerators would "
            "not do. Check the unit of its times, and --prefill-tokens-per-s"
        )


class _Steps:
    """Converts progress of a part to steps of a thousandth."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._shown = 0

    def __call__(self, done: int, of: int) -> None:
        steps = PER_MILLE * done // max(1, of)
        for _ in range(min(steps, PER_MILLE) - self._shown):
            self._progress.advance()
        self._shown = max(self._shown, min(steps, PER_MILLE))
