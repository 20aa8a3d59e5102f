"""``kvtier bench copy``: scattered copies between a device and host memory, by every copy path.

The reference is one contiguous copy of as many bytes, from page-locked memory, in the same round.
Before a path is timed, it is checked that it copies the right bytes and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table

from kvtier.core.errors import ConfigError, DeviceError
from kvtier.devices import CopyBatch, Device, Direction
from kvtier.devices.rig import Rig, open_rig
from kvtier.tools.bench_serve.options import BenchError
from kvtier.tools.report.machine import Fact, machine_facts
from kvtier.tools.report.stats import Estimate, median_with_interval, rounded
from kvtier.tools.report.target import Target, target_words

COPY_BYTES = (2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20)
NUM_COPIES = (64, 4096)
"""Numbers of copies: few, like those of one layer of a short prompt, and many."""
CONTIGUOUS = "contiguous"
USUAL = "usual"
"""The path that a transfer takes by default."""
WANTED = (
    ("32 KiB and more", 32 << 10, 1 << 40, 0.95),
    ("8 KiB", 8 << 10, 8 << 10, 0.85),
    ("4 KiB", 4 << 10, 4 << 10, 0.6),
)
"""Target G1: name, smallest and largest size of a copy, and least rate of the usual path as a share
of a contiguous copy's."""
MANY_BYTES = 16 << 20
"""Least bytes of a batch for which the link limits the rate, not the submission."""

Copy = Callable[[CopyBatch, Direction], None]


@dataclass(frozen=True, slots=True)
class CopyRow:
    """Measurement of one copy path.

    ratio: time of a contiguous copy of as many bytes / time of this one, median over the rounds.
    ratio_low, ratio_high: its interval, if there were enough rounds.
    """

    direction: str
    path: str
    copy_bytes: int
    num_copies: int
    median_s: float
    best_s: float
    worst_s: float
    gb_per_s: float
    ratio: float
    ratio_low: float | None = None
    ratio_high: float | None = None

    @property
    def estimate(self) -> Estimate:
        """The ratio with its interval."""
        if self.ratio_low is None or self.ratio_high is None:
            return Estimate(self.ratio)
        return Estimate(self.ratio, self.ratio_low, self.ratio_high)


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Result on one device. left_out: copy paths that fail, or copy wrong bytes."""

    device: str
    machine: Mapping[str, Fact]
    is_page_locked: bool
    rows: tuple[CopyRow, ...]
    left_out: tuple[str, ...]

    @property
    def targets(self) -> list[Target]:
        """Target G1 on an accelerator: many copies, the worse direction."""
        if self.device == "cpu":
            return []
        found = []
        for name, least, most, wanted in WANTED:
            ratios = [
                row.estimate
                for row in self.rows
                if row.path == USUAL
                and row.num_copies * row.copy_bytes >= MANY_BYTES
                and least <= row.copy_bytes <= most
            ]
            if ratios:
                worst = min(ratios, key=lambda ratio: ratio.value)
                meaning = "rate of scattered copies, by that of one in a piece"
                found.append(Target(f"G1 {name}", meaning, worst, wanted, at_least=True))
        return found

    def as_json(self) -> dict[str, object]:
        """Return the result as one object, as every benchmark prints it."""
        return {
            "benchmark": "copy paths",
            "machine": dict(self.machine),
            "device": self.device,
            "page_locked": self.is_page_locked,
            "left_out": list(self.left_out),
            "rows": [asdict(row) for row in self.rows],
            "targets": [target.as_json() for target in self.targets],
        }


def measure_copies(
    device: Device,
    nbytes: int,
    repeats: int,
    copy_bytes: tuple[int, ...] = COPY_BYTES,
    num_copies: tuple[int, ...] = NUM_COPIES,
) -> CopyResult:
    """Time every copy path of ``device``, interleaved.

    Args:
        device: the device.
        nbytes: size of the buffers on both sides.
        repeats: number of rounds.
        copy_bytes: sizes of copies.
        num_copies: numbers of copies per batch.

    Raises:
        DeviceError: the memory can't be allocated.
    """
    if nbytes < 2 * copy_bytes[0] * num_copies[0]:
        raise ConfigError(f"size: {nbytes} bytes are too few to measure with; give 16MiB or more")
    machine = {**machine_facts(), "device": device.name}
    for finding in device.findings():
        if finding.topic == "accelerator":
            machine |= {"accelerator": finding.found, "driver": finding.note}
    device.prepare(again=True)
    rows: list[CopyRow] = []
    left_out: list[str] = []
    with open_rig(device, nbytes) as rig:
        for direction in Direction:
            for size in copy_bytes:
                counts = {min(count, nbytes // (2 * size)) for count in num_copies}
                for count in sorted(counts - {0}):
                    rows += _measure(device, rig, direction, size, count, repeats, left_out)
        return CopyResult(device.name, machine, rig.is_locked, tuple(rows), tuple(left_out))


def _measure(
    device: Device,
    rig: Rig,
    direction: Direction,
    size: int,
    count: int,
    repeats: int,
    left_out: list[str],
) -> list[CopyRow]:
    batch = rig.scattered(direction, size, count)
    whole = rig.contiguous(direction, batch.num_bytes)
    ways: dict[str, Copy] = {}
    for name, copy in {USUAL: device.copy, **device.ways()}.items():
        try:
            right = rig.brings_the_right_bytes(copy, device.copy, direction, size, count)
            reason = "brought wrong bytes"
        except DeviceError as error:
            right, reason = False, str(error)
        if right:
            ways[name] = copy
        elif name == USUAL:
            raise BenchError(f"{device.name}: copies of {size} bytes: {reason}")
        else:
            left_out.append(f"{name}, {direction.value} of {count} x {size} bytes: {reason}")
    seconds: dict[str, list[float]] = {CONTIGUOUS: [], **{name: [] for name in ways}}
    for _ in range(repeats):
        for name, times in seconds.items():
            began = perf_counter()
            if name == CONTIGUOUS:
                device.copy(whole, direction)
            else:
                ways[name](batch, direction)
            times.append(perf_counter() - began)
    ratios = {
        name: median_with_interval(
            [base / time for base, time in zip(seconds[CONTIGUOUS], times, strict=True)]
        )
        for name, times in seconds.items()
    }
    return [
        CopyRow(
            direction=direction.value,
            path=name,
            copy_bytes=size,
            num_copies=len(batch.size),
            median_s=median(times),
            best_s=min(times),
            worst_s=max(times),
            gb_per_s=batch.num_bytes / median(times) / 1e9,
            ratio=ratios[name].value,
            ratio_low=rounded(ratios[name].low),
            ratio_high=rounded(ratios[name].high),
        )
        for name, times in seconds.items()
    ]


def show_copies(console: Console, result: CopyResult) -> None:
    """Print a table with a line per direction, size and number, a column per path, and targets."""
    ways = list(dict.fromkeys(row.path for row in result.rows))
    locked = "page-locked" if result.is_page_locked else "pageable"
    table = Table(
        title=f"{result.device}, {locked} host memory: GB/s of scattered copies, and in brackets "
        "against one contiguous copy",
        title_justify="left",
    )
    for heading in ("direction", "bytes", "copies"):
        table.add_column(heading, justify="right" if heading != "direction" else "left")
    for way in ways:
        table.add_column(way, justify="right", no_wrap=True)
    lines: dict[tuple[str, int, int], dict[str, CopyRow]] = {}
    for row in result.rows:
        lines.setdefault((row.direction, row.copy_bytes, row.num_copies), {})[row.path] = row
    for (direction, size, count), by_way in lines.items():
        cells = (_cell(by_way.get(way)) for way in ways)
        table.add_row(direction, f"{size:,}", f"{count:,}", *cells)
    console.print(table)
    for line in result.left_out:
        console.print(f"left out: {line}", highlight=False)
    for target in result.targets:
        console.print(target_words(target), highlight=False)


def _cell(row: CopyRow | None) -> str:
    if row is None:
        return ""
    ratio = "" if row.path == CONTIGUOUS else f" ({row.ratio:.2f})"
    return f"{row.gb_per_s:.1f}{ratio}"
