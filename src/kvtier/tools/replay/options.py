"""Options of ``kvtier replay``, and of reading traces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.core.config import parse_size, setting
from kvtier.core.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.observe.recording import Chains

TIME_UNITS = ("auto", "s", "ms")
TOKENIZER = (
    "Tokenizer for traces with text: a tokenizer.json, its directory, or a name of the Hugging "
    "Face hub."
)
TIERS, MODEL, PRICES = "Tiers", "Model and machine", "Prices"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of reading a trace.

    chains: makes keys for files with token ids. Its ``block_tokens`` applies to logs only.
    """

    chains: Chains
    block_tokens: int = setting(0, "Tokens per block; 0 takes the trace's own, 64 for logs.")
    coarsen: int = setting(1, "Blocks of the trace to merge into one.")
    sessions: int = setting(0, "Agentic sessions to replay; 0 for all.")
    hours: float = setting(
        8.0, "Hours within which agentic sessions start, and requests without times come."
    )
    seed: int = setting(11, "Seed of the sessions' start times.")
    shared_prefix: bool = setting(
        True,
        "Sessions with equal lengths of tools and system prompt share these.",
        option={"names": "--shared-prefix/--private-prefix"},
    )
    tokenizer: str = setting("", TOKENIZER, shown="none")
    time_unit: str = setting("auto", "Unit of the timestamps of hashed traces: auto, s or ms.")

    def __post_init__(self) -> None:
        for name, least in (("block_tokens", 0), ("coarsen", 1), ("sessions", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: {getattr(self, name)} is below {least}")
        if self.time_unit not in TIME_UNITS:
            raise ConfigError(f"time_unit: {self.time_unit!r}; use one of {', '.join(TIME_UNITS)}")
        if not 0 < self.hours < 1e5:
            raise ConfigError(f"hours: {self.hours} is no time to draw starts from")


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a tier: bytes, or a share of the bytes of all distinct blocks of the trace."""

    num_bytes: int = 0
    share: float = 0.0

    def of(self, unique_bytes: int) -> int:
        return self.num_bytes or int(self.share * unique_bytes)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay, as they are given. None: the default, which counts as an assumption.

    paths: files of the trace. read: options of reading them.
    """

    paths: tuple[Path, ...]
    read: ReadOptions
    policies: str = setting(
        "",
        "Eviction policies to replay, separated by commas; the recommendation is for the first "
        "one. opt is the optimum.",
        shown="runs,lru,opt; without the native core lru,opt",
        panel=TIERS,
    )
    sizes: str = setting(
        "",
        'Cache sizes to replay: "64GiB,1TiB", or shares of all distinct blocks: "1%,5%".',
        shown="powers of two",
        panel=TIERS,
    )
    device_capacity: str | None = setting(
        None, "The engine's own KV memory; 0 for none.", shown="16GiB", panel=TIERS
    )
    host_capacity: str = setting("0", "Also evaluate this host capacity.", panel=TIERS)
    disk_capacity: str = setting("0", "Also evaluate this disk capacity.", panel=TIERS)
    model: Path | None = setting(
        None,
        "config.json in Hugging Face format, or its directory, for the KV size per token.",
        panel=MODEL,
    )
    kv_dtype: str = setting("auto", "Data type of KV: auto, bfloat16, float8, ...", panel=MODEL)
    bytes_per_token: int | None = setting(
        None,
        "KV bytes per token, of all layers and ranks, instead of --model.",
        shown="131072, as Llama-3-8B",
        panel=MODEL,
    )
    prefill_tokens_per_s: float | None = setting(
        None,
        "Prompt tokens that an accelerator computes per second, at the start of a prompt.",
        shown="10000",
        panel=MODEL,
    )
    prefill_doubles_at: float | None = setting(
        None,
        "Position at which attention makes a token take twice as long as the first.",
        shown="32768",
        panel=MODEL,
    )
    bench: Path | None = setting(
        None, "JSON of kvtier bench serve, instead of --prefill-tokens-per-s.", panel=MODEL
    )
    host_bytes_per_s: str | None = setting(
        None, "Bandwidth from host memory to the device.", shown="25GB", panel=MODEL
    )
    disk_bytes_per_s: str | None = setting(
        None, "Bandwidth from disk to the device.", shown="5GB", panel=MODEL
    )
    host_price_per_gib: float | None = setting(
        None, "Price of a GiB of host memory, in $.", shown="8", panel=PRICES
    )
    disk_price_per_gib: float | None = setting(
        None, "Price of a GiB of disk, in $.", shown="0.15", panel=PRICES
    )
    accelerator_price_per_hour: float | None = setting(
        None, "Price of an accelerator for an hour, in $.", shown="2.5", panel=PRICES
    )
    paid_off_years: float | None = setting(
        None, "Years over which memory is paid off.", shown="3", panel=PRICES
    )
    # One full write per day for five years, as many read-intensive disks are rated.
    disk_full_writes: float | None = setting(
        None,
        "Full writes of a disk before it is worn: drive writes per day, times the days of its "
        "warranty.",
        shown="1825",
        panel=PRICES,
    )

    @property
    def policy_names(self) -> tuple[str, ...]:
        return _names(self.policies)

    def tier_sizes(self) -> tuple[Size, ...]:
        """Return the sizes of host memory and disk to evaluate. Raises ``ConfigError``."""
        found = []
        for name in _names(self.sizes):
            if share := re.fullmatch(r"([0-9]*\.?[0-9]+)\s*%", name):
                found.append(Size(share=float(share[1]) / 100))
            else:
                found.append(Size(parse_size(name, "sizes")))
            if not (found[-1].num_bytes or found[-1].share):
                raise ConfigError(f"sizes: {name!r} is no size to look at")
        return tuple(found)


DEFAULTS: Final = {
    name: field.metadata["shown"].partition(",")[0]
    for name, field in ReplayOptions.__dataclass_fields__.items()
    if field.default is None and field.metadata["shown"]
}
"""Defaults of the options that count as assumptions, as text."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
