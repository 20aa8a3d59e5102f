"""Options of ``kvtier bench serve``: experiments and their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvtier.core.config import BLOCK_SIZE, CHUNK_TOKENS, AuditConfig, parse_size, setting
from kvtier.core.errors import CacheError, ConfigError
from kvtier.serve.engine.config import MODEL

FULL_ACCURACY_PROMPTS = 20
FULL_TTFT_PROMPTS = 100
FULL_PROMPT_TOKENS = 3500
"""Sizes for which the targets are defined."""
QUICK_SIZES = {
    "accuracy_prompts": 6,
    "accuracy_tokens": 1200,
    "steps": 16,
    "ttft_prompts": 12,
    "overhead_pairs": 10,
    "overhead_tokens": 1200,
    "batch_prompts": 4,
    "overlap_rounds": 5,
    "overlap_tokens": 1200,
}
TOKENS = ("accuracy_tokens", "ttft_tokens", "overhead_tokens", "overlap_tokens")
PANEL = "Options"
"""Part of the help of the settings that are among the main ones of other commands."""


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
class ServeOptions(AuditConfig):
    """Settings of ``kvtier bench serve``; ``sized`` gives the full or the quick sizes."""

    model: str = setting("kvtier-tiny", MODEL)
    device: str = setting("auto", '"auto", "cpu", "cuda", "npu", ...')
    quick: bool = setting(False, "Fewer and shorter prompts, for a rough impression.")
    experiments: tuple[Experiment, ...] = USUAL
    ttft_prompts: int = setting(
        FULL_TTFT_PROMPTS, "Prompts of the TTFT experiment.", shown=f"{FULL_TTFT_PROMPTS}"
    )
    accuracy_prompts: int = setting(
        FULL_ACCURACY_PROMPTS,
        "Prompts of the accuracy experiment.",
        shown=f"{FULL_ACCURACY_PROMPTS}",
    )
    steps: int = setting(32, "Tokens generated and compared per accuracy run.", shown="32")
    text: Sequence[Path] = setting(
        (), "File or directory to take prompts from.", shown="the interpreter's own library"
    )
    disk_path: Path | None = setting(
        None,
        "Directory on the disk to measure; files made there are removed.",
        shown="the system's directory for temporary files",
        panel=PANEL,
    )
    disk_bytes_per_s: str = setting(
        "auto",
        'Also run slow-disk, on a disk throttled to this many bytes per second: "50MB", or "auto" '
        "for a disk that takes twice as long as computing.",
        shown="none",
    )
    storage: str = setting(
        "",
        'Also run store, on this store: "valkey://host", "s3://bucket/prefix"; blocks written '
        "there are removed.",
        shown="none",
        panel=PANEL,
        is_secret=True,
    )
    storage_capacity: str = setting(
        "1TiB", "Most bytes of the store's blocks that an engine keeps track of."
    )
    threads: int = setting(0, "Threads to compute with; 0 leaves torch's own choice.")
    block_size: int = setting(BLOCK_SIZE, "Tokens per block.")
    chunk_tokens: int = setting(CHUNK_TOKENS, "Tokens per prefill chunk.")
    seed: int = 0
    """Seed of the order of the text, and of the blocks that the negative control damages."""
    accuracy_tokens: int = FULL_PROMPT_TOKENS
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
    def sized(cls, prompt_tokens: int | None = None, **given: Any) -> ServeOptions:
        """Return options with full or quick sizes, except those that are given.

        prompt_tokens: tokens per prompt, in every experiment.
        """
        sizes = {**QUICK_SIZES} if given.get("quick") else {}
        if prompt_tokens is not None:
            sizes |= dict.fromkeys(TOKENS, prompt_tokens)
        return cls(**{**sizes, **given})

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


@dataclass(frozen=True, slots=True)
class CodecOptions:
    """Settings of ``kvtier bench codec``."""

    model: str = "kvtier-tiny"
    prompts: Path | None = setting(
        None,
        "File with your prompts: one per line, or .jsonl with a field prompt.",
        shown="4 of the interpreter's own library",
    )
    device: str = setting("auto", '"auto", "cpu", "cuda", "npu", ...')
    dtype: str = setting(
        "auto",
        "Type of weights and KV: float32, bfloat16, float16; auto is float32 on CPU and the "
        "model's own elsewhere.",
    )
    block_size: int = setting(BLOCK_SIZE, "Tokens per block.", option={"min": 1})
    answer_tokens: int = setting(
        32, "Tokens of each greedy answer that is compared.", option={"min": 1}
    )
