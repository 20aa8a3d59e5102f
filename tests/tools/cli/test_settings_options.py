"""Options made from settings: the main ones come first, with the settings' own defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvtier.core.config import CacheConfig
from kvtier.serve.engine.config import EngineConfig
from kvtier.serve.server.config import ServerConfig
from kvtier.tools.cli import app
from kvtier.tools.cli.settings_options import MAIN, settings_options


@pytest.mark.parametrize("command", ["serve", "node run", "vllm-args", "sglang-args"])
def test_help_shows_the_five_settings_that_matter_first(command: str) -> None:
    shown = CliRunner().invoke(app, [*command.split(), "--help"]).stdout
    options = [line.split()[0] for line in shown.splitlines() if line.startswith("  --")]
    expected = ["--" + name.replace("_", "-") for name in MAIN]
    if command == "node run":
        expected.remove("--node")
    assert options[: len(expected)] == expected


@pytest.mark.parametrize("kind", [CacheConfig, EngineConfig, ServerConfig])
def test_option_has_the_default_and_the_help_of_its_setting(kind: type[Any]) -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    params = {param.name: param for param in serve.params}
    settings = [field for field in fields(kind) if "meaning" in field.metadata]
    settings = [field for field in settings if field.name in params]
    assert len(settings) > 5
    for field in settings:
        if field.name != "host_capacity":  # the server's own
            assert params[field.name].help.startswith(field.metadata["meaning"])
            assert str(params[field.name].default or "") in (str(field.default or ""), "0")


def test_audit_is_an_option_of_every_front() -> None:
    for command in ("vllm-args", "sglang-args --host-capacity 8GiB"):
        shown = CliRunner().invoke(app, [*command.split(), "--audit", "0.001"])
        assert '"audit":0.001' in shown.stdout
        refused = CliRunner().invoke(app, [*command.split(), "--audit", "2"])
        assert refused.exit_code != 0


def test_zero_that_was_given_is_not_the_default() -> None:
    command = typer.Typer()
    seen: dict[str, object] = {}

    @command.command()
    @settings_options(CacheConfig, ["lookup_deadline_s", "prefetch_timeout_s", "storage"])
    def show(*, settings: dict[str, object]) -> None:
        seen.update(settings)

    assert CliRunner().invoke(command, ["--lookup-deadline-s", "0"]).exit_code == 0
    assert seen == {"lookup_deadline_s": 0.0}
