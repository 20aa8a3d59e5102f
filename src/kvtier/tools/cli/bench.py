"""``kvtier bench``: measure what the cache saves and costs, here or on a server."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.core.config import BLOCK_SIZE, CHUNK_TOKENS, without_password
from kvtier.tools.cli.api_keys import KEY_VARIABLE, take_key
from kvtier.tools.cli.command import CommandLine
from kvtier.tools.cli.output import STDOUT, check_packages, write_json

if TYPE_CHECKING:
    from kvtier.tools.bench_serve.options import Experiment

app = CommandLine()


@app.callback()
def bench() -> None:
    """Measure what the cache saves, and what it costs, on this machine or on a server."""


@app.command()
def serve(
    model: Annotated[
        str, typer.Option(help="A built-in model, or a local directory in Hugging Face format.")
    ] = "kvtier-tiny",
    device: Annotated[str, typer.Option(help='"auto", "cpu", "cuda", "npu", ...')] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and shorter prompts, for a rough impression.")
    ] = False,
    experiments: Annotated[
        str,
        typer.Option(
            help="What to run: accuracy, ttft, overhead, slow-disk, overlap, store, separated by "
            "commas."
        ),
    ] = "accuracy,ttft,overhead",
    ttft_prompts: Annotated[
        int | None, typer.Option(help="Prompts of the TTFT experiment.", show_default="100")
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens per prompt, in every experiment.", show_default="3500"),
    ] = None,
    accuracy_prompts: Annotated[
        int | None, typer.Option(help="Prompts of the accuracy experiment.", show_default="20")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Tokens generated and compared per accuracy run.", show_default="32"),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="File or directory to take prompts from; may be repeated.",
            show_default="the interpreter's own library",
        ),
    ] = None,
    disk_path: Annotated[
        Path | None,
        typer.Option(
            help="Directory on the disk to measure; files made there are removed.",
            show_default="the system's directory for temporary files",
        ),
    ] = None,
    disk_bytes_per_s: Annotated[
        str | None,
        typer.Option(
            help="Also run slow-disk, on a disk throttled to this many bytes per second: "
            '"50MB", or "auto" for a disk that takes twice as long as computing.',
            show_default="none",
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help='Also run store, on this store: "valkey://host", "s3://bucket/prefix"; blocks '
            "written there are removed.",
            show_default="none",
        ),
    ] = None,
    storage_capacity: Annotated[
        str, typer.Option(help="Most bytes of the store's blocks that an engine keeps track of.")
    ] = "1TiB",
    threads: Annotated[
        int, typer.Option(help="Threads to compute with; 0 leaves torch's own choice.")
    ] = 0,
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = BLOCK_SIZE,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens per prefill chunk.")] = CHUNK_TOKENS,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help='Write the result as JSON; "-" for stdout.'),
    ] = None,
    report: Annotated[Path, typer.Option(help="File to write the HTML report to.")] = Path(
        "reports/bench-serve.html"
    ),
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.")] = False,
) -> None:
    """Measure time to first token, accuracy and overhead of the prefix cache, on real text.

    Exits with 1 if reused KV changed an answer, with 2 if it could not measure.
    """
    from rich.console import Console

    # With JSON on stdout, text for people goes to stderr.
    console = Console(stderr=json_file == STDOUT)
    check_packages(["torch", "transformers"], "engine", needs_report=not no_report)
    chosen = _experiments(experiments)

    from kvtier.tools.bench_serve.console import show_result
    from kvtier.tools.bench_serve.options import Experiment, ServeOptions
    from kvtier.tools.bench_serve.serve import run_serve
    from kvtier.tools.report.bar import ProgressBar

    if disk_bytes_per_s is not None and Experiment.SLOW_DISK not in chosen:
        chosen = (*chosen, Experiment.SLOW_DISK)
    if storage is not None and Experiment.STORE not in chosen:
        chosen = (*chosen, Experiment.STORE)
    options = ServeOptions.sized(
        quick=quick,
        model=model,
        device=device,
        threads=threads,
        block_size=block_size,
        chunk_tokens=chunk_tokens,
        text=tuple(text or ()),
        disk_path=disk_path,
        experiments=chosen,
        disk_bytes_per_s=disk_bytes_per_s or "auto",
        storage=storage or "",
        storage_capacity=storage_capacity,
        ttft_prompts=ttft_prompts,
        prompt_tokens=prompt_tokens,
        accuracy_prompts=accuracy_prompts,
        steps=steps,
    )
    command = shlex.join(["kvtier", *map(without_password, sys.argv[1:])])
    with ProgressBar(Console(stderr=True)) as progress:
        result = run_serve(options, progress, command)
    show_result(console, result)
    if json_file is not None:
        write_json(json.dumps(result.as_json(), indent=2), json_file)
    if not no_report:
        from kvtier.tools.bench_serve.report import write_report

        write_report(result, report)
        console.print(f"Report: {report}", highlight=False, soft_wrap=True)
    if not result.correct:
        raise typer.Exit(1)


@app.command()
def copy(
    device: Annotated[str, typer.Option(help='"auto", "cpu", "cuda", "npu", ...')] = "auto",
    size: Annotated[
        str, typer.Option(help="Bytes per copy, and size of the buffer on either side.")
    ] = "256MiB",
    repeats: Annotated[int, typer.Option(min=1, help="Timed copies of each kind.")] = 9,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help='Write the result as JSON; "-" for stdout.'),
    ] = None,
) -> None:
    """Measure copies between a device and host memory: scattered blocks against one large block.

    Determines the fastest copy method on this machine, and stores it for later runs.
    """
    from rich.console import Console

    from kvtier.core.config import parse_size
    from kvtier.devices import find_device
    from kvtier.tools.bench_serve.copies import measure_copies, show_copies
    from kvtier.tools.cli.detect import devices_found

    console = Console(stderr=json_file == STDOUT)
    name = devices_found()[1] if device == "auto" else device
    found = measure_copies(find_device(name), parse_size(size, "size"), repeats)
    show_copies(console, found)
    if json_file is not None:
        write_json(json.dumps(found.as_json(), indent=1), json_file)


@app.command()
def codec(
    model: Annotated[
        str, typer.Argument(help="A built-in model, or a local directory in Hugging Face format.")
    ] = "kvtier-tiny",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File with your prompts: one per line, or .jsonl with a field prompt.",
            show_default="4 of the interpreter's own library",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help='"auto", "cpu", "cuda", "npu", ...')] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            help="Type of weights and KV: float32, bfloat16, float16; auto is float32 on CPU and "
            "the model's own elsewhere."
        ),
    ] = "auto",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = BLOCK_SIZE,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each greedy answer that is compared.")
    ] = 32,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help='Write the result as JSON; "-" for stdout.'),
    ] = None,
) -> None:
    """Measure codecs of stored KV on a model: ratio, speed, and how lossy ones change its answers.

    Three quarters of each prompt are loaded by way of each codec, and the rest is computed after
    them. The next token's distribution is compared with that of exact KV.
    """
    from rich.console import Console

    console = Console(stderr=json_file == STDOUT)
    check_packages(["torch", "transformers"], "engine", needs_report=False)

    from kvtier.tools.bench_serve.codecs import (
        CodecOptions,
        measure_codecs,
        prepare_codecs,
        show_codecs,
    )
    from kvtier.tools.cli.detect import devices_found
    from kvtier.tools.report.bar import ProgressBar

    name = devices_found()[1] if device == "auto" else device
    options = CodecOptions(model, name, dtype, block_size, answer_tokens, prompts)
    prepared = prepare_codecs(options)
    with ProgressBar(Console(stderr=True)) as progress:
        result = measure_codecs(options, prepared, progress)
    show_codecs(console, result)
    if json_file is not None:
        write_json(json.dumps(result.as_json(), indent=2), json_file)


@app.command()
def url(
    url: Annotated[str, typer.Argument(help="Address of a server: http://127.0.0.1:8000")],
    model: Annotated[
        str | None, typer.Option(help="Model to request.", show_default="the server's first")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Total number of requests.")] = 100,
    turns: Annotated[int, typer.Option(min=1, help="Requests per conversation.")] = 4,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1024, help="Requests in flight at a time.")
    ] = 8,
    shared_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of the prefix that all conversations share.")
    ] = 500,
    turn_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that each turn adds to its conversation.")
    ] = 500,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 64,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Use /v1/chat/completions instead of /v1/completions."),
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Seed of the prompts. Runs with equal seeds send equal prompts.")
    ] = 0,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="File or directory to take prompts from; may be repeated.",
            show_default="the interpreter's own library",
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, max=86400.0, help="Timeout of a request, in seconds.")
    ] = 600.0,
    api_key: Annotated[
        str | None,
        typer.Option(help=f"Key of the server; better given as {KEY_VARIABLE} in the environment."),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help='Write the result as JSON; "-" for stdout.'),
    ] = None,
) -> None:
    """Load any OpenAI-compatible server with conversations that share a prefix.

    Each turn repeats its conversation so far, so a cache can serve all of it but the new text.
    Exits with 1 if a request failed, with 2 if the first one did.
    """
    from rich.console import Console

    from kvtier.observe.live.client import server_url
    from kvtier.tools.bench_url.exchange import Endpoint
    from kvtier.tools.bench_url.load import LoadOptions, make_conversations, run_load
    from kvtier.tools.bench_url.result import load_json, show_load
    from kvtier.tools.cli.ping import models_of
    from kvtier.tools.report.bar import ProgressBar

    server, key = server_url(url), take_key(api_key)
    name = model or str(models_of(server, key, timeout_s)[0]["name"])
    options = LoadOptions(
        requests, turns, concurrency, shared_tokens, turn_tokens, max_tokens, seed, (*(text or ()),)
    )
    endpoint = Endpoint(server, name, chat, timeout_s, key)
    conversations = make_conversations(endpoint, options)
    with ProgressBar(Console(stderr=True)) as progress:
        run = run_load(endpoint, options, conversations, progress)
    # With JSON on stdout, the table goes to stderr.
    show_load(Console(stderr=json_file == STDOUT, highlight=False, markup=False, emoji=False), run)
    if json_file is not None:
        write_json(json.dumps(load_json(run), indent=2), json_file)
    if run.failures:
        raise typer.Exit(1)


def _experiments(names: str) -> tuple[Experiment, ...]:
    from kvtier.core.errors import ConfigError
    from kvtier.tools.bench_serve.options import Experiment

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in list(Experiment)]
    if unknown or not wanted:
        raise ConfigError(
            f"experiments: {names!r} is not a list of {', '.join(Experiment)}, separated by commas"
        )
    return tuple(Experiment(name) for name in wanted)
