"""Check that a trace was read in the right units.

A wrong unit is no error in any single line. It shows only in the whole trace, and would lead to a
wrong recommendation.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.core.errors import ConfigError, printable
from kvtier.tools.replay.trace import Trace

if TYPE_CHECKING:
    from kvtier.tools.replay.options import ReadOptions

MAX_WINDOW_S = 366 * 86_400
MAX_TOKENS_PER_S = 1e6
"""Most prompt tokens per second of one trace: about a hundred accelerators, without reuse."""
LEAST_REQUESTS = 100
"""Least number of requests for which the rate is checked; fewer may arrive at once."""
SLACK = 1.1
MAX_EXCESS = 2
"""Largest ratio of tokens in blocks to tokens in prompts, for formats with block ids. Some formats
leave out parts of a prompt; none doubles it."""


def check_window(paths: str, trace: Trace) -> None:
    """Raise ``ConfigError`` for times that are more than a year apart."""
    if trace.window_s > MAX_WINDOW_S:
        days = trace.window_s / 86_400
        raise ConfigError(
            f"{paths}: the first and the last request are {days:,.0f} days apart, so some times "
            "are wrong (a clock that was set, or another unit); replay the part between them"
        )


def check_blocks(path: Path, trace: Trace) -> None:
    """Raise ``ConfigError`` if the blocks have far more tokens than the prompts."""
    num_requests, num_blocks, num_tokens = _sums(trace)
    if num_blocks * trace.block_tokens > MAX_EXCESS * (
        num_tokens + num_requests * trace.block_tokens
    ):
        raise ConfigError(
            printable(
                f"{path}: prompts of {num_tokens:,} tokens have {num_blocks:,} blocks of "
                f"{trace.block_tokens} tokens, more than twice as much: the trace is damaged"
            )
        )


def check_block_tokens(path: Path, trace: Trace, options: ReadOptions) -> str:
    """Raise ``ConfigError`` if the tokens per block don't match the prompts' lengths.

    If the user gave the tokens per block, it returns a note instead. Returns "" if they match.
    """
    num_requests, num_blocks, num_tokens = _sums(trace)
    least = (num_blocks - num_requests) * trace.block_tokens / SLACK
    most = (num_blocks + num_requests) * trace.block_tokens * SLACK
    if not num_blocks or least <= num_tokens <= most:
        return ""
    found = num_tokens / max(num_blocks - num_requests / 2, num_blocks / 2, 1)
    found /= options.coarsen
    tokens = trace.block_tokens // options.coarsen
    doubt = f"prompts have about {found:.0f} tokens per block, and not {tokens}"
    if options.block_tokens:
        return f"{path.name}: {doubt}, as was said."
    raise ConfigError(
        printable(
            f"{path}: {doubt}, as this format usually has: say how many an id has, for example "
            f"--block-tokens {_rounded(found)}"
        )
    )


def check_rate(path: Path, trace: Trace, unit: str) -> None:
    """Raise ``ConfigError`` if an assumed unit of time implies an implausible rate."""
    _, _, num_tokens = _sums(trace)
    if trace.num_requests < LEAST_REQUESTS:
        return
    if num_tokens > MAX_TOKENS_PER_S * trace.window_s:
        raise ConfigError(
            printable(
                f"{path}: read in {unit}, {trace.num_requests:,} requests with {num_tokens:,} "
                f"prompt tokens come within {trace.window_s:.3g} s, more than "
                f"{MAX_TOKENS_PER_S:,.0f} tokens a second: say the unit of timestamp, "
                "--time-unit s or --time-unit ms"
            )
        )


def _sums(trace: Trace) -> tuple[int, int, int]:
    """Return the numbers of requests, blocks and tokens of prompts with known lengths."""
    known = trace.input_tokens > 0
    return (
        int(known.sum()),
        int(trace.lengths[known].sum()),
        sum(trace.input_tokens[known].tolist()),
    )


def _rounded(tokens: float) -> int:
    """Return the nearest power of two if it is within 20 %, otherwise a whole number."""
    power: int = 1 << max(0, round(tokens).bit_length() - 1)
    near = min((power, 2 * power), key=lambda each: abs(each - tokens))
    return near if abs(near - tokens) <= 0.2 * near else max(1, round(tokens))
