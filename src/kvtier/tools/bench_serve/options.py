"""Options of ``kvtier bench serve``: experiments and their sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from kvtier.core.config import BLOCK_SIZE, CHUNK_TOKENS, parse_size
from kvtier.core.errors import CacheError, ConfigError

FULL_ACCURACY_PROMPTS = 20
FULL_TTFT_PROMPTS = 100
FULL_PROMPT_TOKENS = 3500
"""Sizes for which the targets are defined."""


class BenchError(CacheError):
    """A measurement would be invalid; the message says why."""


class Experiment(StrEnum):
    """Experiments of ``kvtier bench serve``."""

    ACCURACY = "accuracy"
    """Are logits with reused KV the same, bit for bit, as without?"""
    TTFT = "ttft"
    """Time to first token with reuse, against without."""
    OVERHEAD = "overhead"
    """Cost of the cache when there is nothing to reuse."""
    SLOW_DISK = "slow-disk"
    """Cost of the cache when reusable blocks are on a disk slower than computing."""
    OVERLAP = "overlap"
    """Share of a load from host memory that the following prefill hides."""
    STORE = "store"
    """Time to first token in another process, from a shared store."""


USUAL = (Experiment.ACCURACY, Experiment.TTFT, Experiment.OVERHEAD)
"""Experiments that run by default."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Settings of ``kvtier bench serve``; ``sized`` gives the full or the quick sizes."""

    model: str = "kvtier-tiny"
    device: str = "auto"
    threads: int = 0
    block_size: int = BLOCK_SIZE
    chunk_tokens: int = CHUNK_TOKENS
    text: tuple[Path, ...] = ()
    """Files and directories to take prompts from; none for the interpreter's own library."""
    disk_path: Path | None = None
    """Directory on the disk to measure; a slab is made in it and removed. None for the system's
    directory for temporary files."""
    seed: int = 0
    """Seed of the order of the text, and of the blocks that the negative control damages."""
    experiments: tuple[Experiment, ...] = USUAL
    disk_bytes_per_s: str = "auto"
    """Bytes per second of the slow disk; "auto": reading takes twice as long as computing."""
    storage: str = field(default="", repr=False)  # a password may be in it
    """URL of the store to measure, with ``Experiment.STORE``."""
    storage_capacity: str = "1TiB"
    """Capacity of the index of the store: bytes of blocks known at a time."""
    accuracy_prompts: int = FULL_ACCURACY_PROMPTS
    accuracy_tokens: int = FULL_PROMPT_TOKENS
    steps: int = 32
    """Tokens generated, and logits compared, per accuracy run."""
    ttft_prompts: int = FULL_TTFT_PROMPTS
    ttft_tokens: int = FULL_PROMPT_TOKENS
    device_share: float = 0.35
    """Share of the TTFT prompts that fit into the device pool."""
    overhead_pairs: int = 40
    overhead_tokens: int = FULL_PROMPT_TOKENS
    batch_prompts: int = 8
    """Prompts per throughput run, each a quarter of ``overhead_tokens`` at most 512 tokens."""
    batch_output_tokens: int = 16
    overlap_rounds: int = 7
    overlap_tokens: int = 0
    """Length of the prompt that is loaded while it is computed; 0 for 16,384 on an accelerator, and
    fewer on a CPU."""
    quick: bool = False
    """Whether the sizes are those of a quick run."""

    def __post_init__(self) -> None:
        for name, least in (
            ("accuracy_prompts", 1),
            ("ttft_prompts", 2),
            ("steps", 1),
            ("overhead_pairs", 1),
            ("batch_prompts", 1),
            ("batch_output_tokens", 1),
            ("overlap_rounds", 1),
            ("overlap_tokens", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: {getattr(self, name)} is below {least}")
        shortest = 2 * self.chunk_tokens + 1
        for name in ("accuracy_tokens", "ttft_tokens", "overhead_tokens"):
            if getattr(self, name) < shortest:
                raise ConfigError(
                    f"{name}: prompts of {getattr(self, name)} tokens have nothing worth reusing; "
                    f"give at least {shortest}, two chunks of chunk_tokens={self.chunk_tokens} "
                    "and one token more"
                )
        if not 0 < self.device_share < 1:
            raise ConfigError(f"device_share: {self.device_share} is not between 0 and 1")
        if self.disk_path is not None and not self.disk_path.is_dir():
            raise ConfigError(
                f"disk_path: {self.disk_path} is no directory; make it, or choose another"
            )
        if (
            self.disk_bytes_per_s != "auto"
            and parse_size(self.disk_bytes_per_s, "disk_bytes_per_s") < 1
        ):
            raise ConfigError(
                f"disk_bytes_per_s: {self.disk_bytes_per_s!r} is no rate; write for instance "
                '"50MB", bytes per second, or "auto"'
            )
        if Experiment.STORE in self.experiments and not self.storage:
            raise ConfigError(
                'storage: none given to measure; write for instance "valkey://127.0.0.1"'
            )
        if not self.experiments:
            raise ConfigError(f"experiments: none chosen; name some of {', '.join(Experiment)}")

    @classmethod
    def sized(
        cls,
        *,
        quick: bool = False,
        model: str = "kvtier-tiny",
        device: str = "auto",
        threads: int = 0,
        block_size: int = BLOCK_SIZE,
        chunk_tokens: int = CHUNK_TOKENS,
        text: tuple[Path, ...] = (),
        disk_path: Path | None = None,
        experiments: tuple[Experiment, ...] = USUAL,
        disk_bytes_per_s: str = "auto",
        storage: str = "",
        storage_capacity: str = "1TiB",
        ttft_prompts: int | None = None,
        prompt_tokens: int | None = None,
        accuracy_prompts: int | None = None,
        steps: int | None = None,
    ) -> ServeOptions:
        """Return options with full or quick sizes, except those that are given."""
        return cls(
            model=model,
            device=device,
            threads=threads,
            block_size=block_size,
            chunk_tokens=chunk_tokens,
            text=text,
            disk_path=disk_path,
            experiments=experiments,
            disk_bytes_per_s=disk_bytes_per_s,
            storage=storage,
            storage_capacity=storage_capacity,
            accuracy_prompts=_first(accuracy_prompts, 6 if quick else FULL_ACCURACY_PROMPTS),
            accuracy_tokens=_first(prompt_tokens, 1200 if quick else FULL_PROMPT_TOKENS),
            steps=_first(steps, 16 if quick else 32),
            ttft_prompts=_first(ttft_prompts, 12 if quick else FULL_TTFT_PROMPTS),
            ttft_tokens=_first(prompt_tokens, FULL_PROMPT_TOKENS),
            overhead_pairs=10 if quick else 40,
            overhead_tokens=_first(prompt_tokens, 1200 if quick else FULL_PROMPT_TOKENS),
            batch_prompts=4 if quick else 8,
            overlap_rounds=5 if quick else 7,
            overlap_tokens=_first(prompt_tokens, 1200 if quick else 0),
            quick=quick,
        )

    @property
    def batch_tokens(self) -> int:
        """Length of a prompt in a throughput run."""
        return min(512, max(self.chunk_tokens + 1, self.overhead_tokens // 4))

    def reused_tokens(self, prompt_tokens: int) -> int:
        """Return the tokens of a cached prompt that need not be computed.

        These are whole chunks, without the last token.
        """
        return (prompt_tokens - 1) // self.chunk_tokens * self.chunk_tokens

    def cached_tokens(self, prompt_tokens: int) -> int:
        """Return the tokens of a prompt that are cached: its whole chunks."""
        return prompt_tokens // self.chunk_tokens * self.chunk_tokens

    def blocks(self, num_tokens: int) -> int:
        """Return the number of blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)


def _first(given: int | None, otherwise: int) -> int:
    return otherwise if given is None else given
