"""``kvtier replay``: replay recorded requests, and compute which memory pays for itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.tools.cli.output import JsonFile, NoReport, Output, Report
from kvtier.tools.cli.settings_options import settings_options
from kvtier.tools.replay.options import ReadOptions, ReplayOptions


@settings_options(ReadOptions, panel="Trace", into="read")
@settings_options(ReplayOptions)
def replay(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="Recordings of kvtier serve --record, traces of Mooncake or Bailian, agentic "
            "sessions, logs of vLLM or SGLang, conversations of ShareGPT, OpenAI batches, exports "
            "of LiteLLM or Langfuse, or lengths of Azure or BurstGPT; also compressed by gzip or "
            "zstd."
        ),
    ],
    json_file: JsonFile = None,
    report: Report = Path("reports/replay.html"),
    no_report: NoReport = False,
    *,
    settings: Mapping[str, Any],
    read: Mapping[str, Any],
) -> None:
    """Replay recorded requests, and show which host memory and disk pay for themselves."""
    output = Output(json_file, None if no_report else report)
    output.check_packages([], "replay")

    from kvtier.core.config import BLOCK_SIZE
    from kvtier.observe.recording import Chains, salt_from_environment
    from kvtier.tools.replay.console import show_result
    from kvtier.tools.replay.replay import run_replay
    from kvtier.tools.replay.summary import recommendation

    chains = Chains(salt_from_environment(), read.get("block_tokens", BLOCK_SIZE))
    options = ReplayOptions(tuple(traces), ReadOptions(chains, **read), **settings)
    with output.progress() as progress:
        result = run_replay(options, progress, output.command)
    show_result(output.console, result)
    output.write_json(result.as_json(recommendation(result)))
    if output.report:
        from kvtier.tools.replay.report import render_report

        output.write_page(render_report(result))
