"""``kvtier``: the commands, one file each."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from kvtier import __version__
from kvtier.tools.cli.audit import audit
from kvtier.tools.cli.bench import app as bench
from kvtier.tools.cli.command import CommandLine
from kvtier.tools.cli.dashboard import dashboard
from kvtier.tools.cli.doctor import doctor
from kvtier.tools.cli.engine_args import sglang_args, vllm_args
from kvtier.tools.cli.explain import explain
from kvtier.tools.cli.inspect import inspect
from kvtier.tools.cli.migrate_config import migrate_config
from kvtier.tools.cli.node import app as node
from kvtier.tools.cli.pack_file import export, import_file
from kvtier.tools.cli.ping import describe, ping
from kvtier.tools.cli.record import record
from kvtier.tools.cli.remote import app as remote
from kvtier.tools.cli.replay import replay
from kvtier.tools.cli.serve import serve
from kvtier.tools.cli.top import top
from kvtier.tools.cli.verify import verify
from kvtier.tools.cli.warm import warm
from kvtier.tools.cli.watch import watch

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
app.command()(audit)
app.command()(dashboard)
app.command()(inspect)
app.command()(verify)
app.command()(warm)
app.command()(export)
app.command("import")(import_file)
app.command("vllm-args")(vllm_args)
app.command("sglang-args")(sglang_args)
app.command("migrate-config")(migrate_config)
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
