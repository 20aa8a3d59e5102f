"""``kvtier bench``: measure what the cache saves and costs, here or on a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.core.errors import ConfigError
from kvtier.serve.engine.config import MODEL
from kvtier.tools.bench_serve.options import CodecOptions, Experiment, ServeOptions
from kvtier.tools.bench_url.load import LoadOptions
from kvtier.tools.cli.api_keys import ApiKey, take_key
from kvtier.tools.cli.command import CommandLine
from kvtier.tools.cli.output import JsonFile, NoReport, Output, Report
from kvtier.tools.cli.settings_options import settings_options

app = CommandLine()


@app.callback()
def bench() -> None:
    """Measure what the cache saves, and what it costs, on this machine or on a server."""


@app.command()
@settings_options(
    ServeOptions,
    # Their defaults depend on --quick, or on whether their experiment runs.
    ttft_prompts=None,
    accuracy_prompts=None,
    steps=None,
    disk_bytes_per_s=None,
)
def serve(
    experiments: Annotated[
        str,
        typer.Option(
            help="What to run: accuracy, ttft, overhead, slow-disk, overlap, store, separated by "
            "commas."
        ),
    ] = "accuracy,ttft,overhead",
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens per prompt, in every experiment.", show_default="3500"),
    ] = None,
    json_file: JsonFile = None,
    report: Report = Path("reports/bench-serve.html"),
    no_report: NoReport = False,
    *,
    settings: Mapping[str, Any],
) -> None:
    """Measure time to first token, accuracy and overhead of the prefix cache, on real text.

    Exits with 1 if reused KV changed an answer, with 2 if it could not measure.
    """
    output = Output(json_file, None if no_report else report)
    output.check_packages(["torch", "transformers"], "engine")
    chosen = _experiments(experiments)

    from kvtier.tools.bench_serve.console import show_result
    from kvtier.tools.bench_serve.serve import run_serve

    wanted = {"disk_bytes_per_s": Experiment.SLOW_DISK, "storage": Experiment.STORE}
    more = [experiment for name, experiment in wanted.items() if name in settings]
    chosen = tuple(dict.fromkeys([*chosen, *more]))
    options = ServeOptions.sized(prompt_tokens, experiments=chosen, **settings)
    with output.progress() as progress:
        result = run_serve(options, progress, output.command)
    show_result(output.console, result)
    output.write_json(result.as_json())
    if output.report:
        from kvtier.tools.bench_serve.report import render_report

        output.write_page(render_report(result))
    if not result.correct:
        raise typer.Exit(1)


@app.command()
def copy(
    device: Annotated[str, typer.Option(help='"auto", "cpu", "cuda", "npu", ...')] = "auto",
    size: Annotated[
        str, typer.Option(help="Bytes per copy, and size of the buffer on either side.")
    ] = "256MiB",
    repeats: Annotated[int, typer.Option(min=1, help="Timed copies of each kind.")] = 9,
    json_file: JsonFile = None,
) -> None:
    """Measure copies between a device and host memory: scattered blocks against one large block.

    Determines the fastest copy method on this machine, and stores it for later runs.
    """
    from kvtier.core.config import parse_size
    from kvtier.devices import find_device
    from kvtier.tools.bench_serve.copies import measure_copies, show_copies

    output = Output(json_file)
    found = measure_copies(find_device(_device(device)), parse_size(size, "size"), repeats)
    show_copies(output.console, found)
    output.write_json(found.as_json())


@app.command()
@settings_options(CodecOptions)
def codec(
    model: Annotated[str, typer.Argument(help=MODEL)] = "kvtier-tiny",
    json_file: JsonFile = None,
    *,
    settings: Mapping[str, Any],
) -> None:
    """Measure codecs of stored KV on a model: ratio, speed, and how lossy ones change its answers.

    Three quarters of each prompt are loaded by way of each codec, and the rest is computed after
    them. The next token's distribution is compared with that of exact KV.
    """
    output = Output(json_file)
    output.check_packages(["torch", "transformers"], "engine")

    from kvtier.tools.bench_serve.codecs import measure_codecs, show_codecs

    device = _device(settings.get("device", "auto"))
    options = CodecOptions(model, **{**settings, "device": device})
    with output.progress() as progress:
        result = measure_codecs(options, progress)
    show_codecs(output.console, result)
    output.write_json(result.as_json())


@app.command()
def audit(
    model: Annotated[str, typer.Argument(help=MODEL)] = "kvtier-tiny",
    device: Annotated[str, typer.Option(help='"auto", "cpu", "cuda", "npu", ...')] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    json_file: JsonFile = None,
) -> None:
    """Put faults into cached KV, one after the other, and count the hits until an audit finds each.

    Checksums find none of these faults. Exits with 1 if one was not found, or its KV was still used
    after it was; or if anything was found where no fault is.
    """
    output = Output(json_file)
    output.check_packages(["torch", "transformers"], "engine")

    from kvtier.serve.engine.config import EngineConfig
    from kvtier.tools.bench_serve.audit import run_audit, show_audit

    config = EngineConfig(model, device, dtype, audit=1.0)
    with output.progress() as progress:
        result = run_audit(config, progress)
    show_audit(output.console, result)
    output.write_json(result.as_json())
    if not result.is_right:
        raise typer.Exit(1)


@app.command()
@settings_options(LoadOptions)
def url(
    url: Annotated[str, typer.Argument(help="Address of a server: http://127.0.0.1:8000")],
    model: Annotated[
        str | None, typer.Option(help="Model to request.", show_default="the server's first")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Use /v1/chat/completions instead of /v1/completions."),
    ] = False,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, max=86400.0, help="Timeout of a request, in seconds.")
    ] = 600.0,
    api_key: ApiKey = None,
    json_file: JsonFile = None,
    *,
    settings: Mapping[str, Any],
) -> None:
    """Load any OpenAI-compatible server with conversations that share a prefix.

    Each turn repeats its conversation so far, so a cache can serve all of it but the new text.
    Exits with 1 if a request failed, with 2 if the first one did.
    """
    from kvtier.observe.live.client import server_url
    from kvtier.tools.bench_url.exchange import Endpoint
    from kvtier.tools.bench_url.load import make_conversations, run_load
    from kvtier.tools.bench_url.result import load_json, show_load
    from kvtier.tools.cli.ping import models_of

    output = Output(json_file)
    server, key = server_url(url), take_key(api_key)
    name = model or str(models_of(server, key, timeout_s)[0]["name"])
    options = LoadOptions(**settings)
    endpoint = Endpoint(server, name, chat, timeout_s, key)
    conversations = make_conversations(endpoint, options)
    with output.progress() as progress:
        run = run_load(endpoint, options, conversations, progress)
    show_load(output.console, run)
    output.write_json(load_json(run))
    if run.failures:
        raise typer.Exit(1)


def _device(name: str) -> str:
    """Return the name of a device, for "auto" that of this machine."""
    from kvtier.tools.cli.detect import devices_found

    return devices_found()[1] if name == "auto" else name


def _experiments(names: str) -> tuple[Experiment, ...]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in list(Experiment)]
    if unknown or not wanted:
        raise ConfigError(
            f"experiments: {names!r} is not a list of {', '.join(Experiment)}, separated by commas"
        )
    return tuple(Experiment(name) for name in wanted)
