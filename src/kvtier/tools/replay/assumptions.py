"""Assumptions of a replay besides the trace: model, machine, prices."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.core.config import parse_size
from kvtier.core.errors import ConfigError
from kvtier.plan import PrefillCost
from kvtier.tools.replay.model import kv_group
from kvtier.tools.replay.options import DEFAULTS, ReplayOptions
from kvtier.tools.report.figures import capacity, number

GIB = 1 << 30
HOURS_PER_YEAR = 8766.0
HOURS_PER_MONTH = HOURS_PER_YEAR / 12

GIVEN, DEFAULT = "given", "assumed"


@dataclass(frozen=True, slots=True)
class Assumption:
    """One assumption in words. source: its origin; ``DEFAULT`` if it was not given."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Figures from which savings are computed. All prices are in one currency.

    Attributes:
        bytes_per_token: KV bytes per token.
        prefill: cost of computing a prompt.
        device_bytes: KV memory of the engine itself; 0 for none.
        host_bytes_per_s, disk_bytes_per_s: bandwidths towards the device.
        host_price, disk_price: prices of a GiB.
        accelerator_price: price of an accelerator for an hour.
        years: years over which memory is paid off.
        disk_writes: full writes of a disk before it is worn; infinite for one that does not wear.
    """

    bytes_per_token: int
    prefill: PrefillCost
    device_bytes: int
    host_bytes_per_s: float
    disk_bytes_per_s: float
    host_price: float
    disk_price: float
    accelerator_price: float
    years: float
    disk_writes: float = math.inf

    def __post_init__(self) -> None:
        for name in (
            "bytes_per_token",
            "host_bytes_per_s",
            "disk_bytes_per_s",
            "years",
            "disk_writes",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")
        for name in ("device_bytes", "host_price", "disk_price", "accelerator_price"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 0")

    @property
    def host_price_per_hour(self) -> float:
        """Price of a GiB of host memory per hour, paid off over its life."""
        return self.host_price / (self.years * HOURS_PER_YEAR)

    def disk_price_per_hour(self, writes_per_hour: float) -> float:
        """Return the price per hour of a GiB of disk with this many full writes per hour.

        A disk that wears out earlier is paid off over that time.
        """
        hours = self.years * HOURS_PER_YEAR
        if writes_per_hour * hours > self.disk_writes:
            hours = self.disk_writes / writes_per_hour
        return self.disk_price / hours


SIZES = {
    "device_capacity": "the engine's own KV memory",
    "host_bytes_per_s": "host memory to device",
    "disk_bytes_per_s": "disk to device",
}
"""Labels of sizes, and of rates per second."""
FIGURES = {
    "host_price_per_gib": ("price of host memory", "${:g} per GiB"),
    "disk_price_per_gib": ("price of disk", "${:g} per GiB"),
    "accelerator_price_per_hour": ("price of an accelerator", "${:g} per hour"),
    "paid_off_years": ("time to pay memory off", "{:,g} years"),
    "disk_full_writes": ("life of a disk", "{:,g} full writes"),
}
"""Labels of other figures, and their form."""


def assume(options: ReplayOptions) -> tuple[Machine, tuple[Assumption, ...]]:
    """Return model, machine and prices of a replay, and each of them in words.

    Raises:
        ConfigError: options contradict each other, or can't be read.
    """
    found: list[Assumption] = []

    def take(name: str, instead: str = "") -> tuple[Any, str]:
        """Return a setting, or its default, and which of both it is."""
        given = getattr(options, name)
        if instead and given is not None and getattr(options, instead) is not None:
            raise ConfigError(f"{name}: --{instead} says it, too; give one of them")
        return (DEFAULTS[name], DEFAULT) if given is None else (given, GIVEN)

    kv_bytes, source = take("bytes_per_token", "model")
    if options.model is not None:
        group = kv_group(options.model, options.kv_dtype)
        kv_bytes = group.bytes_per_block
        source = f"{options.model}: {group.num_layers} layers, {group.attention}, {group.dtype}"
    found.append(Assumption("KV of a token", f"{int(kv_bytes):,} bytes", source))
    text, source = take("prefill_doubles_at")
    doubles_at = float(text)
    if not doubles_at > 0:
        raise ConfigError(f"prefill_doubles_at: {doubles_at} is not above 0")
    shown = f"token {doubles_at:,.0f} of a prompt"
    found.append(Assumption("where time per token doubles", shown, source))
    text, source = take("prefill_tokens_per_s", "bench")
    rate = float(text)
    if options.bench is not None:
        rate, source = rate_of_bench(options.bench, doubles_at), str(options.bench)
    prefill = prefill_cost(rate, doubles_at)
    shown = f"{number(rate)} tokens/s of an accelerator"
    found.append(Assumption("prefill rate", shown, source))
    sizes = []
    for name, label in SIZES.items():
        text, source = take(name)
        sizes.append(size := parse_size(text, name))
        shown = f"{size / 1e9:.4g} GB/s" if name.endswith("_per_s") else capacity(size)
        found.append(Assumption(label, shown, source))
    figures = []
    for name, (label, form) in FIGURES.items():
        text, source = take(name)
        figures.append(float(text))
        found.append(Assumption(label, form.format(figures[-1]), source))
    return Machine(int(kv_bytes), prefill, *sizes, *figures), tuple(found)


def prefill_cost(tokens_per_s: float, doubles_at: float) -> PrefillCost:
    """Return the prefill cost.

    Attention to earlier tokens takes longer as their number grows.

    tokens_per_s: rate at the start of a prompt. doubles_at: token at which the rate is half of it.
    """
    if not 0 < tokens_per_s < 1e12:
        raise ConfigError(f"prefill_tokens_per_s: {tokens_per_s} is no rate")
    return PrefillCost(1 / tokens_per_s, 1 / (tokens_per_s * doubles_at))


def rate_of_bench(path: Path, doubles_at: float) -> float:
    """Return the prefill rate at the start of a prompt, from the JSON of ``kvtier bench serve``.

    Its cold prompts all have the same length. The rate follows from their mean time and from
    ``doubles_at``.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        num_tokens = float(found["second_pass"]["prompt_tokens"])
        seconds = float(found["ttft_ms"]["cold"]["mean"]) / 1000
        if not (num_tokens > 0 and seconds > 0):
            raise ValueError("nothing was measured")
    except OSError as error:
        raise ConfigError(f"bench: {path} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"bench: {path} is no result of `kvtier bench serve --json` with the ttft experiment"
        ) from error
    return (num_tokens + num_tokens**2 / (2 * doubles_at)) / seconds
