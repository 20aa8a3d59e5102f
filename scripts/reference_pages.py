"""Write the pages of ``docs/reference`` that follow from the code.

They are those of settings, commands, metrics and Python.

python scripts/reference_pages.py            write them
python scripts/reference_pages.py --check    exit with 1 where one is out of date
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

import kvtier
from kvtier.connectors.sglang.shared.settings import LinkerSettings, StorageSettings
from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.connectors.vllm.standalone.settings import TierSettings
from kvtier.core import errors
from kvtier.core.config import CacheConfig, NodeCacheConfig
from kvtier.observe import specs
from kvtier.tools.cli import app
from kvtier.tools.cli.settings_options import MAIN

FOLDER = Path(__file__).parents[1] / "docs/reference"
MADE = "<!-- Written by scripts/reference_pages.py. -->\n\n"
WIDTH = 100
UNTOLD = ("help", "help_all", "install_completion", "show_completion")
"""Options of every command line, which say nothing of kvtier."""


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()),
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _paragraph(text: str) -> str:
    """Return a paragraph of a docstring, wrapped; a Google-style section of names as a list."""
    title, _, rest = text.partition("\n")
    if title not in ("Args:", "Attributes:", "Raises:"):
        return _fill(text)
    items = re.split(r"\n(?=\S)", textwrap.dedent(rest))
    shown = (re.sub(r"^(\w+):", r"- `\1`:", item) for item in items)
    return "\n".join([f"{title}\n", *(_fill(each, "  ") for each in shown)])


def _prose(text: str) -> str:
    """Return the paragraphs of a docstring, wrapped, with Markdown's quotes for code."""
    text = inspect.cleandoc(text).replace("\b", "").replace("``", "`")
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(_paragraph(paragraph) for paragraph in paragraphs if paragraph.strip())


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


# -- settings -------------------------------------------------------------------------------------


FRONTS = {
    "cache": CacheConfig,
    "vLLM": VllmSettings,
    "vLLM's secondary tier": TierSettings,
    "linker": LinkerSettings,
    "SGLang's storage": StorageSettings,
    "node": NodeCacheConfig,
}
SETTINGS = """\
# Settings

A setting has one name everywhere: `disk_path` in Python, in the JSON of a connector, and in a TOML
file; `--disk-path` on the command line. It has one default, unless the table names another one for
a use. Sizes are written as "8GiB" or in bytes.

## The five settings that matter

Start with these, and leave the rest as it is. `--help` of the serving commands shows them first.
`kvtier serve` has `--host-capacity 2x`, twice the memory of its device pool; `cache` takes such a
multiple, too.

"""
ALL_SETTINGS = """\
## All settings

`cache` is `kvtier.CacheConfig`: `kvtier serve`, `kvtier.attach` and programs. `vLLM` is
`kv_connector_extra_config`, `linker` and `SGLang's storage` are SGLang's `extra_config`, and `node`
is `kvtier node run`. A command has an option for the settings that its [help](commands.md) shows.

"""


def _settings(names: Iterable[str]) -> Iterator[str]:
    """Yield the rows of settings: meaning, default, and uses that have it."""
    yield "| setting | meaning | default | in |"
    yield "| -- | -- | -- | -- |"
    for name in names:
        found = {
            front: field
            for front, kind in FRONTS.items()
            for field in dataclasses.fields(kind)
            if field.name == name
        }
        first = next(iter(found.values()))
        usual = str(first.metadata["shown"] or first.default)
        others = [
            f"{front}: `{field.default}`"
            for front, field in found.items()
            if field.default != first.default
        ]
        default = "; ".join([usual if first.metadata["shown"] else f"`{usual}`", *others])
        fronts = "all" if len(found) == len(FRONTS) else ", ".join(found)
        yield f"| `{name}` | {_cell(first.metadata['meaning'])} | {_cell(default)} | {fronts} |"


def settings_page() -> str:
    """Return the page of the settings of every use."""
    names = dict.fromkeys(
        field.name for kind in FRONTS.values() for field in dataclasses.fields(kind)
    )
    five = "\n".join(_settings(MAIN))
    return MADE + SETTINGS + five + "\n\n" + ALL_SETTINGS + "\n".join(_settings(names)) + "\n"


# -- commands -------------------------------------------------------------------------------------


def _default(param: Any) -> str:
    """Return an option's default as its help shows it."""
    if param.required:
        return "required"
    shown = param.show_default
    if isinstance(shown, str):
        return _cell(shown)
    value = param.default
    if value is None or value == "" or callable(value):
        return ""
    if getattr(param, "is_flag", False):
        names = param.opts if value else param.secondary_opts
        return f"`{names[0]}`" if names else "off"
    return f"`{_cell(getattr(value, 'value', value))}`"


def _options(params: list[Any], context: Any) -> Iterator[str]:
    yield "| option | meaning | default |"
    yield "| -- | -- | -- |"
    for param in params:
        names = [*param.opts, *param.secondary_opts]
        if not names[0].startswith("-"):
            names = [param.name.upper()]
        shown = ", ".join(f"`{name}`" for name in names)
        choices = param.display_type(context).strip("<>").split("|")
        words = _cell(param.help or "")
        if len(choices) > 1:
            words += f" One of {', '.join(choices)}."
        yield f"| {shown} | {words} | {_default(param)} |"


def _commands(name: str, command: Any) -> Iterator[str]:
    """A section for a command, and for each of its own."""
    children = getattr(command, "commands", {})
    params = [
        param
        for param in command.params
        if not getattr(param, "hidden", False) and param.name not in UNTOLD
    ]
    yield f"## {name}\n" if name.count(" ") < 2 else f"### {name}\n"
    if command.help:
        yield _prose(command.help) + "\n"
    if params:
        yield (
            "\n".join(_options(params, command.make_context(name, [], resilient_parsing=True)))
            + "\n"
        )
    for child in children.values():
        if not child.hidden:
            yield from _commands(f"{name} {child.name}", child)


def commands_page() -> str:
    """Return the page of every option of every command."""
    intro = (
        "# Commands\n\n"
        "Every command and its options, as `--help` prints them. Sizes are written as "
        '"8GiB"\nor in bytes.\n\n'
    )
    return MADE + intro + "\n".join(_commands("kvtier", typer.main.get_command(app)))


# -- metrics --------------------------------------------------------------------------------------


METRICS = (
    (
        "The cache",
        """Exported by `kvtier serve`, by SGLang with kvtier (for the KV pool, by the first rank),
        and by `kvtier node` with the additional labels `tenant` and `room`. Under vLLM some have
        the prefix `vllm:`, and some have [other names](#under-vllm).""",
        specs.CACHE,
    ),
    ("kvtier serve", "About its HTTP clients.", specs.SERVER),
    ("kvtier node", "About itself, its engines and its tenants.", specs.NODE),
    (
        "Under vLLM",
        """They count blocks, which vLLM and these metrics call chunks. Each has vLLM's own labels
        `model_name` and `engine`, too.""",
        specs.UNDER_VLLM,
    ),
    (
        "Under SGLang",
        "Beside those of the cache.",
        (specs.SGLANG_HINT_ACTIONS, specs.SGLANG_RECORDED_REQUESTS),
    ),
)


def metrics_page() -> str:
    """Return the page of every metric that kvtier exports."""
    parts = [
        "# Metrics\n",
        _fill(
            """Every metric that kvtier exports to Prometheus. A name ends with its unit; a
            histogram is exported as `_bucket`, `_sum` and `_count`.
            [Watching](../guides/watching.md) shows them as a page and in the terminal, and
            [`kvtier dashboard`](../guides/deploying.md#dashboard-and-alerts) prints a Grafana
            dashboard."""
        )
        + "\n",
    ]
    for title, meaning, metrics in METRICS:
        rows = [
            f"| `{spec.name}` | {spec.kind} | {', '.join(f'`{label}`' for label in spec.labels)} "
            f"| {_cell(spec.meaning)} |"
            for spec in metrics
        ]
        table = "\n".join(["| metric | type | labels | meaning |", "| -- | -- | -- | -- |", *rows])
        parts += [f"## {title}\n", _fill(meaning) + "\n", table + "\n"]
    return MADE + "\n".join(parts)


# -- Python ---------------------------------------------------------------------------------------


PYTHON = """\
# Python

All names below are importable from `kvtier`. Importing them needs numpy, and no torch.
[An engine of your own](../guides/own-engine.md) shows the calls in their order.

A call that breaks the contract raises `UsageError` and changes nothing. A setting that can't be
used raises `ConfigError`. A call after `close` raises `Closed`. A miss, a full tier and a failed
load are outcomes, and raise nothing.
"""


def _signature(what: Any) -> str:
    text = str(inspect.signature(what))
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    text = re.sub(r"<function (\w+)>|<built-in function (\w+)>", r"\1\2", text)
    return text.replace("(self, ", "(").replace("(self)", "()")


def _code(name: str, what: Any) -> str:
    """Return a signature as a block of code, one parameter in each line where it is long."""
    text = f"{name}{_signature(what)}"
    if len(text) > WIDTH:
        parameters = re.split(r", (?=\w+: )", text[len(name) + 1 : text.rindex(")")])
        text = f"{name}(\n    " + ",\n    ".join(parameters) + ",\n" + text[text.rindex(")") :]
    return f"```python\n{text}\n```"


def _is_public(name: str, what: object) -> bool:
    return not name.startswith("_") and (inspect.isfunction(what) or isinstance(what, property))


def _members(kind: type) -> Iterator[str]:
    for name, what in vars(kind).items():
        if not _is_public(name, what):
            continue
        if kind is kvtier.Lease and not isinstance(what, property):
            continue  # the cache calls these
        if isinstance(what, property):
            told = str(inspect.signature(what.fget)).partition("-> ")[2].strip("'")  # type: ignore[arg-type]
            yield f"**`{name}`**: `{told}`"
        else:
            yield _code(name, what)
        doc = inspect.getdoc(what)
        if doc:
            yield _prose(doc)


def _meanings(kind: type) -> dict[str, str]:
    """Return the meaning of each field: its own, or the sentence below it in the source."""
    own = {field.name: field.metadata.get("meaning") for field in dataclasses.fields(kind)}
    if all(own.values()):
        return own
    (body,) = (
        each for each in ast.parse(inspect.getsource(kind)).body if isinstance(each, ast.ClassDef)
    )
    told = {}
    for field, below in pairwise(body.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            told[field.target.id] = str(below.value.value)
    return told


def _fields(kind: type) -> Iterator[str]:
    """The fields of a dataclass, with the sentence that follows each in the source."""
    meanings = _meanings(kind)
    rows = []
    for field in dataclasses.fields(kind):
        default = "required" if field.default is dataclasses.MISSING else f"`{field.default!s}`"
        if field.default == "" or (isinstance(field.default, tuple) and not field.default):
            default = "none"
        if field.default_factory is not dataclasses.MISSING:
            default = "none"
        meaning = _cell(meanings.get(field.name, "")).replace("``", "`")
        rows.append(f"| `{field.name}` | `{_cell(field.type)}` | {default} | {meaning} |")
    if rows:
        yield "\n".join(["| field | type | default | meaning |", "| -- | -- | -- | -- |", *rows])


def python_page() -> str:
    """Return the page of the public names of ``kvtier``."""
    parts = [PYTHON]
    names = [name for name in kvtier.__all__ if name != "__version__"]
    told = [name for name in names if not _is_error(getattr(kvtier, name))]
    for name in told:
        what = getattr(kvtier, name)
        parts.append(f"## {name}\n")
        is_dataclass = inspect.isclass(what) and dataclasses.is_dataclass(what)
        if not is_dataclass:
            parts.append(_code(name, what) + "\n")
        parts.append(_prose(what.__doc__ or "") + "\n")
        if is_dataclass:
            parts += [f"{field}\n" for field in _fields(what)]
        if inspect.isclass(what):
            parts += [f"{member}\n" for member in _members(what)]
    parts.append("## Errors\n")
    rows = ["| error | is a | meaning |", "| -- | -- | -- |"]
    for name, what in vars(errors).items():
        if _is_error(what):
            bases = ", ".join(f"`{each.__name__}`" for each in what.__bases__)
            meaning = _cell(inspect.getdoc(what)).replace("``", "`")
            rows.append(f"| `{name}` | {bases} | {meaning} |")
    parts.append("\n".join(rows) + "\n")
    return MADE + "\n".join(parts)


def _is_error(what: object) -> bool:
    return inspect.isclass(what) and issubclass(what, Exception)


PAGES = {
    "settings.md": settings_page,
    "commands.md": commands_page,
    "metrics.md": metrics_page,
    "python.md": python_page,
}


def main() -> int:
    stale = []
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        print(f"out of date: {', '.join(stale)}; run python scripts/reference_pages.py")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
