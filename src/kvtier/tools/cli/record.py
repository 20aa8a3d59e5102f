"""``kvtier record``: convert a log of requests to a trace that holds none of their text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtier.core.config import BLOCK_SIZE
from kvtier.tools.replay.options import TOKENIZER


def record(
    logs: Annotated[
        list[Path],
        typer.Argument(help="Logs of vLLM or SGLang with token ids, or anything kvtier replays."),
    ],
    to: Annotated[Path, typer.Option(help="The trace to write; must not exist.")],
    block_tokens: Annotated[int, typer.Option(help="Tokens per key.")] = BLOCK_SIZE,
    tokenizer: Annotated[str, typer.Option(help=TOKENIZER, show_default="none")] = "",
) -> None:
    """Record requests as salted hashes, lengths and times, without text or token ids.

    kvtier serve --record does the same while it serves.
    """
    from rich.console import Console

    from kvtier.observe.recording import Chains, salt_from_environment
    from kvtier.tools.replay.traces import ReadOptions, read_traces
    from kvtier.tools.replay.traces.recorded import write_trace
    from kvtier.tools.report.figures import counted

    chains = Chains(salt_from_environment(), block_tokens)
    trace = read_traces(logs, ReadOptions(chains, tokenizer=tokenizer))
    num_bytes = write_trace(trace, chains.name, to)
    Console(stderr=True).print(
        f"{counted(trace.num_requests, 'request')} in {num_bytes:,} bytes: {to}",
        highlight=False,
        soft_wrap=True,
    )
