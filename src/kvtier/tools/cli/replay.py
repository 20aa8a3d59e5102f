"""``kvtier replay``: replay recorded requests, and compute which memory pays for itself."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.tools.cli.output import STDOUT, check_packages, write_json

if TYPE_CHECKING:
    from kvtier.tools.replay.replay import Size

_TRACE, _TIERS, _MODEL, _PRICES, _OUTPUT = "Trace", "Tiers", "Model and machine", "Prices", "Output"

PIPED_WIDTH = 120
"""Columns of output that is not a terminal, so that no table is cut."""
DEVICE_CAPACITY = "16GiB"
BYTES_PER_TOKEN = 131_072
PREFILL_TOKENS_PER_S = 10_000.0
PREFILL_DOUBLES_AT = 32_768.0
HOST_BYTES_PER_S = "25GB"
DISK_BYTES_PER_S = "5GB"
HOST_PRICE = 8.0
DISK_PRICE = 0.15
ACCELERATOR_PRICE = 2.5
YEARS = 3.0
DISK_WRITES = 1825.0
"""Full writes of a disk: one per day for five years, as many read-intensive disks are rated."""


def replay(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="Recordings of kvtier serve --record, traces of Mooncake or Bailian, agentic "
            "sessions, or logs of vLLM or SGLang; also compressed by gzip or zstd."
        ),
    ],
    policies: Annotated[
        str,
        typer.Option(
            help="Eviction policies to replay, separated by commas; the recommendation is for the "
            "first one. opt is the optimum.",
            rich_help_panel=_TIERS,
            show_default="runs,lru,opt; without the native core lru,opt",
        ),
    ] = "",
    sizes: Annotated[
        str,
        typer.Option(
            help='Cache sizes to replay: "64GiB,1TiB", or shares of all distinct blocks: "1%,5%".',
            rich_help_panel=_TIERS,
            show_default="powers of two",
        ),
    ] = "",
    device_capacity: Annotated[
        str | None,
        typer.Option(
            help="The engine's own KV memory; 0 for none.",
            rich_help_panel=_TIERS,
            show_default=DEVICE_CAPACITY,
        ),
    ] = None,
    host_capacity: Annotated[
        str, typer.Option(help="Host memory to evaluate, too.", rich_help_panel=_TIERS)
    ] = "0",
    disk_capacity: Annotated[
        str, typer.Option(help="Disk capacity to evaluate, too.", rich_help_panel=_TIERS)
    ] = "0",
    block_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens per block; 0 takes the trace's own, 64 for logs.", rich_help_panel=_TRACE
        ),
    ] = 0,
    time_unit: Annotated[
        str,
        typer.Option(
            help="Unit of the timestamps of hashed traces: auto, s or ms.", rich_help_panel=_TRACE
        ),
    ] = "auto",
    coarsen: Annotated[
        int,
        typer.Option(help="Blocks of the trace to merge into one.", rich_help_panel=_TRACE),
    ] = 1,
    sessions: Annotated[
        int, typer.Option(help="Agentic sessions to replay; 0 for all.", rich_help_panel=_TRACE)
    ] = 0,
    hours: Annotated[
        float,
        typer.Option(help="Hours within which agentic sessions start.", rich_help_panel=_TRACE),
    ] = 8.0,
    seed: Annotated[
        int, typer.Option(help="Seed of the sessions' start times.", rich_help_panel=_TRACE)
    ] = 11,
    shared_prefix: Annotated[
        bool,
        typer.Option(
            "--shared-prefix/--private-prefix",
            help="Sessions with equal lengths of tools and system prompt share these.",
            rich_help_panel=_TRACE,
        ),
    ] = True,
    model: Annotated[
        Path | None,
        typer.Option(
            help="config.json in Hugging Face format, or its directory, for the KV size per token.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(help="Data type of KV: auto, bfloat16, float8, ...", rich_help_panel=_MODEL),
    ] = "auto",
    bytes_per_token: Annotated[
        int | None,
        typer.Option(
            help="KV bytes per token, of all layers and ranks, instead of --model.",
            rich_help_panel=_MODEL,
            show_default=f"{BYTES_PER_TOKEN}, as Llama-3-8B",
        ),
    ] = None,
    prefill_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            help="Prompt tokens that an accelerator computes per second, at the start of a prompt.",
            rich_help_panel=_MODEL,
            show_default=f"{PREFILL_TOKENS_PER_S:g}",
        ),
    ] = None,
    prefill_doubles_at: Annotated[
        float | None,
        typer.Option(
            help="Position at which attention makes a token take twice as long as the first.",
            rich_help_panel=_MODEL,
            show_default=f"{PREFILL_DOUBLES_AT:g}",
        ),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            help="JSON of kvtier bench serve, instead of --prefill-tokens-per-s.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    host_bytes_per_s: Annotated[
        str | None,
        typer.Option(
            help="Bandwidth from host memory to the device.",
            rich_help_panel=_MODEL,
            show_default=HOST_BYTES_PER_S,
        ),
    ] = None,
    disk_bytes_per_s: Annotated[
        str | None,
        typer.Option(
            help="Bandwidth from disk to the device.",
            rich_help_panel=_MODEL,
            show_default=DISK_BYTES_PER_S,
        ),
    ] = None,
    host_price_per_gib: Annotated[
        float | None,
        typer.Option(
            help="Price of a GiB of host memory, in $.",
            rich_help_panel=_PRICES,
            show_default=f"{HOST_PRICE:g}",
        ),
    ] = None,
    disk_price_per_gib: Annotated[
        float | None,
        typer.Option(
            help="Price of a GiB of disk, in $.",
            rich_help_panel=_PRICES,
            show_default=f"{DISK_PRICE:g}",
        ),
    ] = None,
    accelerator_price_per_hour: Annotated[
        float | None,
        typer.Option(
            help="Price of an accelerator for an hour, in $.",
            rich_help_panel=_PRICES,
            show_default=f"{ACCELERATOR_PRICE:g}",
        ),
    ] = None,
    paid_off_years: Annotated[
        float | None,
        typer.Option(
            help="Years over which memory is paid off.",
            rich_help_panel=_PRICES,
            show_default=f"{YEARS:g}",
        ),
    ] = None,
    disk_full_writes: Annotated[
        float | None,
        typer.Option(
            help="Full writes of a disk before it is worn: drive writes per day, times the days of "
            "its warranty.",
            rich_help_panel=_PRICES,
            show_default=f"{DISK_WRITES:g}",
        ),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help='Write the result as JSON; "-" for stdout.',
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    report: Annotated[
        Path, typer.Option(help="File to write the HTML report to.", rich_help_panel=_OUTPUT)
    ] = Path("reports/replay.html"),
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Write no report.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Replay recorded requests, and show which host memory and disk pay for themselves."""
    from rich.console import Console

    # With JSON on stdout, text for people goes to stderr.
    console = Console(stderr=json_file == STDOUT)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    check_packages([], "replay", needs_report=not no_report)

    from kvtier.core.config import BLOCK_SIZE, parse_size
    from kvtier.observe.recording import Chains, salt_from_environment
    from kvtier.tools.replay.assumptions import Machine
    from kvtier.tools.replay.console import show_result
    from kvtier.tools.replay.policies import usual_policies
    from kvtier.tools.replay.replay import ReplayOptions, run_replay
    from kvtier.tools.replay.settings import ReplaySettings
    from kvtier.tools.replay.summary import recommendation
    from kvtier.tools.replay.traces import ReadOptions
    from kvtier.tools.report.bar import ProgressBar

    settings = ReplaySettings()
    kv_bytes = settings.bytes_per_token(bytes_per_token, model, kv_dtype, BYTES_PER_TOKEN)
    doubles_at = settings.doubles_at(prefill_doubles_at, PREFILL_DOUBLES_AT)
    machine = Machine(
        bytes_per_token=kv_bytes,
        prefill=settings.prefill(prefill_tokens_per_s, bench, doubles_at, PREFILL_TOKENS_PER_S),
        device_bytes=settings.size("device_capacity", device_capacity, DEVICE_CAPACITY),
        host_bytes_per_s=settings.size("host_bytes_per_s", host_bytes_per_s, HOST_BYTES_PER_S),
        disk_bytes_per_s=settings.size("disk_bytes_per_s", disk_bytes_per_s, DISK_BYTES_PER_S),
        host_price=settings.price("host_price_per_gib", host_price_per_gib, HOST_PRICE),
        disk_price=settings.price("disk_price_per_gib", disk_price_per_gib, DISK_PRICE),
        accelerator_price=settings.price(
            "accelerator_price_per_hour", accelerator_price_per_hour, ACCELERATOR_PRICE
        ),
        years=settings.price("paid_off_years", paid_off_years, YEARS),
        disk_writes=settings.price("disk_full_writes", disk_full_writes, DISK_WRITES),
    )
    options = ReplayOptions(
        paths=tuple(traces),
        read=ReadOptions(
            Chains(salt_from_environment(), block_tokens or BLOCK_SIZE),
            block_tokens,
            coarsen,
            sessions,
            hours,
            seed,
            shared_prefix,
            time_unit,
        ),
        machine=machine,
        assumptions=settings.assumptions,
        policies=_names(policies) or usual_policies(),
        sizes=_sizes(sizes),
        host_bytes=parse_size(host_capacity, "host_capacity"),
        disk_bytes=parse_size(disk_capacity, "disk_capacity"),
    )
    command = shlex.join(["kvtier", *sys.argv[1:]])
    with ProgressBar(Console(stderr=True)) as progress:
        result = run_replay(options, progress, command)
    show_result(console, result)
    if json_file is not None:
        write_json(json.dumps(result.as_json(recommendation(result)), indent=2), json_file)
    if not no_report:
        from kvtier.tools.replay.report import write_report

        write_report(result, report)
        console.print(f"Report: {report}", highlight=False, soft_wrap=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _sizes(text: str) -> tuple[Size, ...]:
    from kvtier.core.config import parse_size
    from kvtier.core.errors import ConfigError
    from kvtier.tools.replay.replay import Size

    found = []
    for name in _names(text):
        if share := re.fullmatch(r"([0-9]*\.?[0-9]+)\s*%", name):
            found.append(Size(share=float(share[1]) / 100))
        else:
            found.append(Size(parse_size(name, "sizes")))
        if not (found[-1].num_bytes or found[-1].share):
            raise ConfigError(f"sizes: {name!r} is no size to look at")
    return tuple(found)
