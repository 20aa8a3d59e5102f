"""All commands: help, exit status, ``--json`` and ``--config``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kvtier.tools.cli import app
from tests.kit.servers import free_port


def kvtier(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=variables)


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every command that can be called, with its name."""
    root: Any = typer.main.get_command(app)
    for name, each in (group or root).commands.items():
        if hasattr(each, "commands"):
            yield from commands(each, (*path, name))
        else:
            yield " ".join((*path, name)), each


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_no_name_of_an_option_is_cut_in_a_narrow_window(name: str) -> None:
    params = COMMANDS[name].params
    names = [opt for param in params for opt in param.opts if "--" in opt]
    assert names
    for option in ("--help", "--help-all") if "--help-all" in names else ("--help",):
        shown = kvtier(*name.split(), option, COLUMNS="80", TERMINAL_WIDTH="80")
        assert shown.exit_code == 0
        words = shown.output.replace("/", " ").replace(",", " ").split()
        assert [name for name in names if name not in words] == []
        assert "…" not in shown.output


def test_help_explains_what_matters_and_names_the_rest() -> None:
    short, whole = (kvtier("serve", option).output for option in ("--help", "--help-all"))
    assert "Host DRAM for KV" in short
    assert "--port" in short
    assert "Port; 0 takes any free one" not in short
    assert "kvtier serve --help-all" in short
    assert "Port; 0 takes any free one" in whole
    assert short.count("\n") < whole.count("\n") / 2


def test_summaries_of_commands_are_whole_in_a_narrow_window() -> None:
    shown = kvtier("--help", COLUMNS="80", TERMINAL_WIDTH="80").output
    assert "..." not in shown.partition("Commands:")[2]
    assert "which host memory and disk pay for themselves." in " ".join(shown.split())


def impossible(folder: Path) -> dict[str, list[str]]:
    """Return arguments that make each command fail."""
    nothing, dead = str(folder / "nothing"), f"127.0.0.1:{free_port()}"
    return {
        "serve": ["no-such-model", "--port", "0"],
        "watch": [dead, "--host", "192.0.2.1"],
        "top": [dead, "--json"],
        "ping": [dead],
        "describe": [dead],
        "replay": [nothing, "--sizes", "much", "--no-report"],
        "record": [nothing, "--to", f"{nothing}.jsonl"],
        "explain": [dead, "--prompt-file", __file__],
        "audit": [dead, __file__],
        "inspect": [nothing],
        "verify": [nothing],
        "warm": [f"valkey://{dead}", f"dir:{nothing}", "--bytes", "1GiB"],
        "export": [nothing, f"{nothing}.kvpack", "--model", "kvtier-tiny"],
        "import": [nothing, f"dir://{nothing}"],
        "vllm-args": ["--host-capacity", "much"],
        "sglang-args": ["--disk-path", nothing, "--disk-capacity", "much"],
        "migrate-config": [nothing],
        "node run": ["--host-capacity", "much"],
        **{f"node {name}": ["--socket", nothing] for name in ("status", "clear", "quota")},
        **{
            f"node {name}": ["aabb", "--socket", nothing]
            for name in ("lookup", "prefetch", "pin", "delete")
        },
        "remote check": [f"valkey://{dead}"],
        "remote prune": [f"valkey://{dead}", "--older-than", "7d"],
        "remote migrate": [f"valkey://{dead}", "s3://bucket"],
        "bench serve": ["--experiments", "none", "--no-report"],
        "bench copy": ["--size", "much"],
        "bench codec": ["--prompts", nothing],
        "bench audit": ["--dtype", "much"],
        "bench url": [dead],
    }


NEVER_FAIL = {"doctor", "dashboard"}


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - NEVER_FAIL))
def test_a_command_that_cannot_do_its_work_ends_with_2_and_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tools.cli.top.FIRST_S", 0.0)
    done = kvtier(*name.split(), *impossible(tmp_path)[name])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvtier {name}: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_json_without_a_file_is_standard_output() -> None:
    done = kvtier("bench", "copy", "--json", "--device", "cpu", "--size", "1MiB", "--repeats", "1")
    assert done.exit_code == 0, done.output
    assert isinstance(json.loads(done.stdout), dict)


# -- configuration file ----------------------------------------------------------------------------


def config(folder: Path, text: str) -> str:
    path = folder / "kvtier.toml"
    path.write_text(text)
    return str(path)


def extra_of(*arguments: str) -> dict[str, object]:
    """Return the settings that ``kvtier vllm-args`` makes of its options."""
    done = kvtier("vllm-args", "--json", *arguments)
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(done.stdout)["kv_connector_extra_config"]
    return found


def test_options_of_the_file_hold_and_the_command_line_wins(tmp_path: Path) -> None:
    file = config(
        tmp_path,
        'host-capacity = "2GiB"\neviction-policy = "lru"\nblocks_per_chunk = 4\n'
        'storage = ["a=valkey://a", "b=valkey://b"]\n',
    )
    found = extra_of("--config", file)
    assert found["host_capacity"] == "2GiB"
    assert found["eviction_policy"] == "lru"
    assert found["blocks_per_chunk"] == 4
    assert found["storage"] == ["a=valkey://a", "b=valkey://b"]
    assert extra_of("--config", file, "--host-capacity", "3GiB")["host_capacity"] == "3GiB"
    assert extra_of("--host-capacity", "3GiB", "--config", file)["host_capacity"] == "3GiB"


def test_flag_and_argument_come_from_the_file(tmp_path: Path) -> None:
    file = config(tmp_path, f'path = "{tmp_path}/no-slab"\njson = true\n')
    done = kvtier("inspect", "--config", file)
    assert done.exit_code == 2
    assert "no-slab" in done.stderr
    file = config(tmp_path, "alerts = true\n")
    assert "groups:" in kvtier("dashboard", "--config", file).stdout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('host-capcity = "2GiB"', "'host-capcity' is no option of this command; did you mean host"),
        ("zzz = 1", "'zzz' is no option of this command; see --help for the names"),
        ("host-capacity = ", "is no TOML file"),
        ("host-capacity = true", "'host-capacity' is True; give text or a number"),
        ('host-capacity = ["1GiB"]', "'host-capacity' takes one value; give no list"),
        ('json = "yes"', "'json' is 'yes'; give true or false"),
        ("[serve]\nport = 1", "'serve' is no option of this command"),
    ],
)
def test_bad_file_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    done = kvtier("vllm-args", "--config", config(tmp_path, text))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("kvtier vllm-args: config: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_missing_file_is_one_sentence(tmp_path: Path) -> None:
    done = kvtier("serve", "--config", str(tmp_path / "none.toml"))
    assert done.exit_code == 2
    assert "No such file" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("vllm-args --grid 1.5", "--grid: '1.5' should be a valid integer"),
        ("vllm-args --audit 0.1%", "--audit: '0.1%' should be a valid number"),
        ("serve --port abc", "--port: 'abc' should be a valid integer"),
        ("vllm-args --grid -16", "--grid: '-16' should be greater than or equal to 0"),
        ("vllm-args --mode all", "--mode: 'all' is not one of"),
        ("vllm-args --host-capacity much", "--host-capacity: can't read 'much' as a size"),
        ("serve --chunk-tokens 17", "--chunk-tokens: 17 is no multiple of --block-size=64"),
        ("serve --disk-path /proc/kv", "disk tier: /proc/kv can't be created"),
    ],
)
def test_wrong_value_is_named_in_one_sentence(arguments: str, sentence: str) -> None:
    shown = kvtier(*arguments.split())
    assert shown.exit_code == 2
    assert shown.stderr.startswith(f"kvtier {arguments.partition(' ')[0]}: {sentence}")
    assert shown.stderr.count("\n") == 1
