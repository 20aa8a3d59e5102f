"""Run one replay, from files to a result. Start here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvtier.core.config import parse_size
from kvtier.core.errors import ConfigError
from kvtier.index.policies.replayed import LRU
from kvtier.tools.replay.assumptions import Machine, assume
from kvtier.tools.replay.evidence import LEAST_REUSES, LEAST_TURNS, gather, rate_per_hour
from kvtier.tools.replay.options import ReplayOptions, Size
from kvtier.tools.replay.policies import (
    OPTIMUM,
    Replayer,
    ReplayHits,
    check_policies,
    usual_policies,
)
from kvtier.tools.replay.result import HitPoint, ReplayResult, Setup, TraceFacts
from kvtier.tools.replay.savings import Prompts
from kvtier.tools.replay.segments import find_segments
from kvtier.tools.replay.sizing import SizeChoice, Sizing, usual_sizes
from kvtier.tools.replay.trace import Ints, Trace
from kvtier.tools.replay.traces import read_traces
from kvtier.tools.replay.traces.lines import check_file
from kvtier.tools.report.progress import Progress

PER_MILLE = 1000
MAX_ACCELERATORS = 10_000


def run_replay(options: ReplayOptions, progress: Progress, command: str = "") -> ReplayResult:
    """Read the traces, replay them, and evaluate the sizes. Raises ``ConfigError``."""
    return _Replay(options, progress).result(command)


class _Replay:
    def __init__(self, options: ReplayOptions, progress: Progress) -> None:
        self._options, self._progress = options, progress
        # All options are checked before a long trace is read.
        self._machine, self._assumptions = assume(options)
        self._policies = options.policy_names or usual_policies()
        check_policies(self._policies)
        self._policy = next(name for name in self._policies if name != OPTIMUM)
        wanted = options.tier_sizes()
        self._asked_bytes = (
            parse_size(options.host_capacity, "host_capacity"),
            parse_size(options.disk_capacity, "disk_capacity"),
        )
        for path in options.paths:
            check_file(path)
        done = self._steps("read")
        self._trace = read_traces(options.paths, options.read, done)
        done(1, 1)
        self._segments = find_segments(self._trace, self._steps("find reuse"))
        _check_load(self._trace, self._machine)
        self._replayer = Replayer(self._trace, self._segments)
        self._kept: dict[int, ReplayHits] = {}
        machine = self._machine
        self._block_bytes = self._trace.block_tokens * machine.bytes_per_token
        self._unique_bytes = self._segments.num_unique * self._block_bytes
        self._sizes = self._tier_sizes(wanted) if self._trace.has_contents else []
        # Hits in the engine's own memory, which is assumed to be LRU.
        self._device = self._replayer.hits(LRU, machine.device_bytes // self._block_bytes).found
        self._num_supported = self._segments.num_unique // LEAST_TURNS
        self._sizing = Sizing(
            self._trace, machine, self._device, self._decisive, self._num_supported
        )

    def _steps(self, title: str) -> Callable[[int, int], None]:
        """Begin a part whose progress is shown in steps of a thousandth; return how to report."""
        self._progress.begin(title, PER_MILLE)
        num_shown = 0

        def report(done: int, of: int) -> None:
            nonlocal num_shown
            steps = min(PER_MILLE, PER_MILLE * done // max(1, of))
            for _ in range(steps - num_shown):
                self._progress.advance()
            num_shown = max(num_shown, steps)

        return report

    def _tier_sizes(self, wanted: tuple[Size, ...]) -> list[int]:
        if not wanted:
            least = max(self._block_bytes, self._machine.device_bytes)
            return usual_sizes(self._unique_bytes, least)
        found = sorted({size.of(self._unique_bytes) for size in wanted})
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
        trace, sizing = self._trace, self._sizing
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
            self._machine,
            self._assumptions,
            self._policy,
            curves,
            self._hit_point(self._unique_bytes, self._segments.num_reused),
            tuple(host),
            tuple(disk),
            choice,
            tuple(self._setups(choice)),
            gained,
        )

    def _curves(self) -> dict[str, tuple[HitPoint, ...]]:
        policies = self._policies
        self._progress.begin("replay", len(policies) * len(self._sizes))
        curves: dict[str, tuple[HitPoint, ...]] = {}
        for name in policies:
            points = []
            for num_bytes in self._sizes:
                num_blocks = num_bytes // self._block_bytes
                is_decisive = name == self._policy
                replay = self._decisive if is_decisive else partial(self._replayer.hits, name)
                hits = replay(num_blocks)
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

    def _setups(self, choice: SizeChoice | None) -> list[Setup]:
        device_bytes, savings = self._machine.device_bytes, self._sizing.prompts.savings
        found = [Setup("as it is", device_bytes, 0, 0, self._sizing.without)]
        if any(self._asked_bytes):
            host, disk = (
                self._decisive(size // self._block_bytes).found for size in self._asked_bytes
            )
            asked = savings(self._device, host, disk)
            found.append(Setup("asked for", device_bytes, *self._asked_bytes, asked))
        if choice is not None and (choice.host or choice.disk):
            host_bytes, disk_bytes = (
                0 if point is None else point.num_bytes for point in (choice.host, choice.disk)
            )
            found.append(Setup("recommended", device_bytes, host_bytes, disk_bytes, choice.savings))
        return found

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
