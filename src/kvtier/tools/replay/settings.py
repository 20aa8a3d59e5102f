"""Settings of model, machine and prices, with assumptions for those that are not given."""

from __future__ import annotations

from pathlib import Path

from kvtier.core.config import parse_size
from kvtier.core.errors import ConfigError
from kvtier.plan import PrefillCost
from kvtier.tools.replay.assumptions import (
    DEFAULT,
    GIVEN,
    Assumption,
    prefill_cost,
    rate_of_bench,
)
from kvtier.tools.replay.model import kv_group
from kvtier.tools.report.figures import capacity, number

WORDS = {
    "device_capacity": ("the engine's own KV memory", ""),
    "host_bytes_per_s": ("host memory to device", "/s"),
    "disk_bytes_per_s": ("disk to device", "/s"),
    "host_price_per_gib": ("price of host memory", " per GiB"),
    "disk_price_per_gib": ("price of disk", " per GiB"),
    "accelerator_price_per_hour": ("price of an accelerator", " per hour"),
    "paid_off_years": ("time to pay memory off", " years"),
    "disk_full_writes": ("life of a disk", " full writes"),
}
"""Label and unit of each setting."""


class ReplaySettings:
    """Reads settings one by one, and records them in words as assumptions."""

    def __init__(self) -> None:
        self._found: list[Assumption] = []

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        return tuple(self._found)

    def size(self, name: str, given: str | None, default: str) -> int:
        """Return a size in bytes, or a rate in bytes per second."""
        value = parse_size(default if given is None else given, name)
        shown = f"{value / 1e9:.4g} GB" if name.endswith("_per_s") else capacity(value)
        self._say(name, shown, given is not None)
        return value

    def price(self, name: str, given: float | None, default: float) -> float:
        """Return a price, or a number of years or writes."""
        value = default if given is None else given
        shown = f"${value:g}" if "price" in name else f"{value:,g}"
        self._say(name, shown, given is not None)
        return value

    def doubles_at(self, given: float | None, default: float) -> float:
        """Return the position of the token that takes twice as long as a prompt's first."""
        value = default if given is None else given
        if not value > 0:
            raise ConfigError(f"prefill_doubles_at: {value} is not above 0")
        source = DEFAULT if given is None else GIVEN
        self._found.append(
            Assumption("where time per token doubles", f"token {value:,.0f} of a prompt", source)
        )
        return value

    def bytes_per_token(
        self, given: int | None, model: Path | None, dtype: str, default: int
    ) -> int:
        """Return the KV bytes per token: as given, or from the model's configuration."""
        if given is not None and model is not None:
            raise ConfigError("bytes_per_token: --model says it, too; give one of them")
        value, source = default if given is None else given, DEFAULT if given is None else GIVEN
        if model is not None:
            group = kv_group(model, dtype)
            value = group.bytes_per_block
            source = f"{model}: {group.num_layers} layers, {group.attention}, {group.dtype}"
        self._found.append(Assumption("KV of a token", f"{value:,} bytes", source))
        return value

    def prefill(
        self, given: float | None, bench: Path | None, doubles_at: float, default: float
    ) -> PrefillCost:
        """Return the cost of computing a prompt."""
        if given is not None and bench is not None:
            raise ConfigError("prefill_tokens_per_s: --bench says it, too; give one of them")
        value, source = default if given is None else given, DEFAULT if given is None else GIVEN
        if bench is not None:
            value, source = rate_of_bench(bench, doubles_at), str(bench)
        cost = prefill_cost(value, doubles_at)
        self._found.append(
            Assumption("prefill rate", f"{number(value)} tokens/s of an accelerator", source)
        )
        return cost

    def _say(self, name: str, value: str, is_given: bool) -> None:
        words, unit = WORDS[name]
        self._found.append(Assumption(words, value + unit, GIVEN if is_given else DEFAULT))
