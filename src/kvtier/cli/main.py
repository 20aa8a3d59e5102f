"""``kvtier``: the commands, one file each."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from kvtier import __version__
from kvtier.cli.bench import app as bench
from kvtier.cli.command import CommandLine
from kvtier.cli.dashboard import dashboard
from kvtier.cli.doctor import doctor
from kvtier.cli.engine_args import sglang_args, vllm_args
from kvtier.cli.explain import explain
from kvtier.cli.inspect import inspect
from kvtier.cli.node import app as node
from kvtier.cli.ping import describe, ping
from kvtier.cli.record import record
from kvtier.cli.remote import app as remote
from kvtier.cli.replay import replay
from kvtier.cli.serve import serve
from kvtier.cli.top import top
from kvtier.cli.verify import verify
from kvtier.cli.watch import watch

app = CommandLine(
    name="kvtier",
    help="A hierarchical KV cache for LLM inference.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(watch)
app.command()(top)
app.command()(ping)
app.command()(describe)
app.command()(replay)
app.command()(record)
app.command()(doctor)
app.command()(explain)
app.command()(dashboard)
app.command()(inspect)
app.command()(verify)
app.command("vllm-args")(vllm_args)
app.command("sglang-args")(sglang_args)
app.add_typer(node, name="node")
app.add_typer(remote, name="remote")
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    # Of a terminal or a pipe that takes ASCII only, a file name or a sign is no reason to fail.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
