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


def test_options_have_the_values_of_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_HOST_CAPACITY", "2GiB")
    monkeypatch.setenv("KVTIER_STORAGE", "valkey://a s3://b/c")
    monkeypatch.setenv("KVTIER_ENCRYPTION_KEY", "00" * 32)
    shown = CliRunner().invoke(app, ["vllm-args", "--host-capacity", "3GiB"]).stdout
    assert '{"spec_name":"kvtier","host_capacity":"3GiB","storage":["valkey://a","s3://b/c"]}' in (
        shown
    )
    assert '"host_capacity":"2GiB"' in CliRunner().invoke(app, ["sglang-args"]).stdout
    monkeypatch.setenv("KVTIER_EVICTION_POLICY", "mru")
    refused = CliRunner().invoke(app, ["vllm-args"])
    assert refused.exit_code != 0


@pytest.mark.parametrize("command", [["serve"], ["node", "run"]])
def test_variables_are_those_of_the_cache_and_not_of_one_command(command: list[str]) -> None:
    found = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]  # type: ignore[attr-defined]
    variables = {param.name: param.envvar for param in found.params if param.envvar}
    expected = {"host_capacity", "disk_path", "disk_capacity", "storage", "codec"}
    assert expected <= set(variables)
    assert variables == {name: f"KVTIER_{name.upper()}" for name in variables}
    # An orchestrator sets KVTIER_PORT for a service called kvtier.
    assert not {"port", "host", "socket", "api_key", "encryption_key"} & set(variables)
