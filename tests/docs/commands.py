"""Commands of shell blocks, and a check of each by the parser of its program."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from kvtier.connectors.common.contract import Contract
from kvtier.connectors.sglang.shared import contract as sglang
from kvtier.connectors.sglang.shared.settings import LinkerSettings, StorageSettings
from kvtier.connectors.vllm.offloading import contract as vllm
from kvtier.connectors.vllm.shared.registry import SPEC_NAME
from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.connectors.vllm.standalone.settings import TierSettings
from kvtier.core.errors import INSTALL, ConfigError
from kvtier.tools.cli import app

ROOT = Path(__file__).parents[2]
WORDS_OF_THE_SHELL = frozenset({"do", "then", "else", "until", "while", "if", "!", "{", "("})
ASSIGNED = re.compile(r"\w+=.*", re.DOTALL)
ENDS = frozenset({"done", "fi", "}", ")"})
OTHERS = frozenset(
    {
        *("cat", "cd", "chmod", "cp", "curl", "df", "echo", "export", "find", "grep", "head"),
        *("jq", "kill", "ls", "mkdir", "mktemp", "mv", "printf", "rm", "seq", "sleep", "sort"),
        *("tail", "tee", "test", "touch", "truncate", "ulimit", "wait", "weed", "xargs"),
        *(
            "dd",
            "docker",
            "for",
            "install",
            "helm",
            "lm_eval",
            "kubectl",
            "mooncake_client",
            "mooncake_master",
            "openssl",
            "set",
            "source",
            "systemctl",
            "systemd-sysusers",
            "timeout",
        ),
    }
)
"""Programs of others that pages use. A name that is in no list here is a typing error, or new."""


UsageError: Any = typer.BadParameter.__mro__[1]
"""Base class of everything that the parser refuses; typer has no name for it."""


class CommandError(AssertionError):
    """A command that its program would refuse."""


def commands(script: str) -> Iterator[list[str]]:
    """Return each simple command of a script as words, without redirections and variables."""
    script = re.sub(r"<<'?(\w+)'?\n.*?\n\1\n", "\n", script, flags=re.DOTALL)
    for line in _lines(script.replace("\\\n", " ")):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        skip = False
        for word in lexer:
            if skip:
                skip = False
            elif word and set(word) <= set("<>&") and set(word) & set("<>"):
                if words and words[-1].isdigit():
                    words.pop()
                skip = True
            elif word and set(word) <= set("|&;()"):
                yield from _simple(words)
                words = []
            else:
                words.append(word)
        yield from _simple(words)


def _lines(script: str) -> Iterator[str]:
    """Return the lines of a script; a quotation that goes on joins them."""
    begun = ""
    for line in script.splitlines():
        begun += line
        try:
            shlex.split(begun, comments=True)
        except ValueError:
            begun += "\n"
            continue
        yield begun
        begun = ""
    if begun.strip():
        raise CommandError(f"a quotation does not end: {begun!r}")


def _simple(words: list[str]) -> Iterator[list[str]]:
    while words and (
        words[0] in WORDS_OF_THE_SHELL or re.fullmatch(r"\w+=.*", words[0], re.DOTALL)
    ):
        words = words[1:]
    if not words or words[0] in ENDS or words == ["$"]:
        return
    if words[0].startswith("-"):  # what follows on $(...)
        return
    yield words
    if words[0] == "xargs":
        yield words[1:]


def check(words: Sequence[str]) -> None:
    """Raises ``CommandError`` with the command and what is wrong with it."""
    name = words[0].rsplit("/", 1)[-1]
    module = _module(words)
    try:
        if name == "kvtier":
            check_kvtier(words[1:])
        elif module == "sglang.launch_server":
            check_sglang(words[3:])
        elif list(words[:2]) == ["vllm", "serve"]:
            check_vllm(words[2:])
        elif module is not None:
            _check_module(module, words[3:])
        elif name in CHECKS:
            CHECKS[name](words[1:])
        elif name not in OTHERS and not name.startswith("$"):
            raise CommandError(f"nobody knows a command {name!r}; tests/docs/commands.py has all")
    except UsageError as error:
        raise CommandError(f"{shlex.join(words)}: {error.format_message()}") from error
    except (ConfigError, ValueError) as error:
        raise CommandError(f"{shlex.join(words)}: {error}") from error


def _module(words: Sequence[str]) -> str | None:
    is_python = words[0].rsplit("/", 1)[-1] in ("python", "python3")
    return words[2] if is_python and len(words) > 2 and words[1] == "-m" else None


def check_kvtier(words: Sequence[str], partly: bool = False) -> None:
    """Check a command of kvtier with the real parser.

    partly: required arguments and option values may be missing, as in a command within a sentence.
    """
    command = typer.main.get_command(app)
    path, rest = [], list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        path.append(rest.pop(0))
        command = command.commands[path[-1]]  # type: ignore[attr-defined]
    if hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        raise CommandError(f"kvtier {' '.join(path)} has no command {rest[0]!r}")
    if partly and path and not rest:
        return  # a group of commands
    try:
        command.make_context(" ".join(["kvtier", *path]), rest)
    except typer.Exit:
        pass  # --version, --help
    except UsageError as error:
        if not (partly and type(error).__name__ in ("MissingParameter", "BadOptionUsage")):
            raise


def check_vllm(words: Sequence[str]) -> None:
    """Check vLLM's options with the contract, and kvtier's settings with their own reader."""
    for option, value in _options(words, vllm.VLLM):
        if option != "--kv-transfer-config":
            continue
        if inner := re.fullmatch(r"\$\((.*)\)", value):
            for command in commands(inner[1]):
                check(command)
            continue
        _check_extra(json.loads(value)["kv_connector_extra_config"])


def _check_extra(extra: Mapping[str, Any]) -> None:
    """Check the settings of kvtier in a connector's, or in those of the connectors inside it."""
    if "connectors" in extra:
        for inside in extra["connectors"]:
            if inside["kv_connector"] != "NixlConnector":
                _check_extra(inside["kv_connector_extra_config"])
    elif extra.get("spec_name") == SPEC_NAME:
        VllmSettings.read(extra)
    elif extra.get("eviction_policy") != "kvtier":
        (tier,) = extra["secondary_tiers"]
        TierSettings.read(tier)


def check_sglang(words: Sequence[str]) -> None:
    """Check SGLang's options in the same way."""
    for option, value in _options(words, sglang.STORAGE):
        if option == StorageSettings.option:
            StorageSettings.read(json.loads(value))
        elif option == LinkerSettings.option:
            LinkerSettings.read(json.loads(value)["linker_extra_config"])


def _options(words: Sequence[str], contract: Contract) -> Iterator[tuple[str, str]]:
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            option, _, given = word.partition("=")
            if option == "--port":
                continue  # of any server
            if option not in contract.options:
                raise CommandError(f"{option} is not in the contract with {contract.name}")
            yield option, given or value


def _check_module(module: str, words: Sequence[str]) -> None:
    if module.startswith(("pip", "http.server", "dynamo.", "sglang_router.")):
        return
    if module == "pytest":
        _check_pytest(words)
        return
    if module == "vllm.entrypoints.openai.api_server" and words[0] == "--model":
        check_vllm(words[2:])
        return
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise CommandError(f"there is no module {module}")
    files = [Path(spec.origin)]
    if spec.submodule_search_locations:
        files = list(Path(spec.origin).parent.glob("**/*.py"))
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    for word in words:
        if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source + SHARED_OPTIONS:
            raise CommandError(f"{module} has no option {word}")


SHARED_OPTIONS = '"--json"'
"""Options that every benchmark has: ``benchmarks.report.output`` adds them."""


def _check_pytest(words: Sequence[str]) -> None:
    for word in words:
        if "/" in word and not (ROOT / word.partition("::")[0]).exists():
            raise CommandError(f"there is no test {word}")


def _check_make(words: Sequence[str]) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, _, value = word.partition("=")
        pattern = rf"^{re.escape(name)} *[:?]?=|\$\({name}\)" if value else rf"^{re.escape(word)}:"
        if not re.search(pattern, text, re.MULTILINE) and word != "setup":
            raise CommandError(f"make {word}: the Makefile has none")


@cache
def _extras() -> frozenset[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return frozenset(project["optional-dependencies"])


def _check_pip(words: Sequence[str]) -> None:
    for word in words:
        if word.startswith("kvtier") and "kvtier[" not in INSTALL:
            raise CommandError(f"{word} is a release that is not there yet; write {INSTALL}")
        if found := re.fullmatch(r"(?:kvtier|\.)\[([\w,]+)\]", word):
            if unknown := set(found[1].split(",")) - _extras():
                raise CommandError(f"kvtier has no extra {', '.join(sorted(unknown))}")
        elif word.startswith("./") and not (ROOT / word).is_dir():
            raise CommandError(f"there is no folder {word}")


def _check_python(words: Sequence[str]) -> None:
    if not words or words[0].startswith("$"):  # not of this repository
        return
    if words[0].endswith(".py") and not (ROOT / words[0]).is_file():
        raise CommandError(f"there is no {words[0]}")


CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    "make": _check_make,
    "pip": _check_pip,
    "pytest": _check_pytest,
    "python": _check_python,
}
