"""Measure the language and the structure of the sources: counts that a reader feels.

Run it from anywhere: ``python scripts/house.py`` prints a table, ``--json`` one JSON object, and
``--list NAME`` every place that is counted under one name. ``make lint`` runs it with ``--check``,
which fails if a count exceeds its limit in ``LIMITS``.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "kvtier"
PYTHON_FOLDERS = ("src", "tests", "benchmarks", "scripts", "examples")

# A docstring that begins with one of these is a clause without a subject.
VAGUE_FIRST_WORDS = frozenset({"how", "of", "that", "what", "where", "which", "who"})
MAX_COLUMNS = 100
SMALL_FILE_LINES = 70

# The largest count that `--check` accepts. Lower a limit when its count falls; never raise it.
LIMITS: dict[str, int] = {
    "vague_docstrings": 0,
    "vague_attribute_docstrings": 0,
    "doubled_class_names": 1,
    "wide_prose": 0,
    "ladder_forwards": 4,
    "root_modules": 10,
    "small_files_of_one_importer": 23,
}


def python_files() -> Iterator[Path]:
    """Yield every Python file of the repository's own sources, sorted by path."""
    for folder in PYTHON_FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def place(path: Path, line: int, text: str = "") -> str:
    """Return ``path:line: text`` with a path relative to the repository."""
    return f"{path.relative_to(ROOT)}:{line}: {text}".rstrip(": ")


def docstrings() -> Iterator[tuple[Path, int, str]]:
    """Yield (file, line, first line) of every docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in python_files():
        for node in ast.walk(parse(path)):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield path, getattr(node, "lineno", 1), text.splitlines()[0]


def attribute_docstrings() -> Iterator[tuple[Path, int, str]]:
    """Yield (file, line, first line) of every string that documents the assignment before it."""
    for path in python_files():
        for node in ast.walk(parse(path)):
            body = getattr(node, "body", None)
            for before, each in pairwise(body if isinstance(body, list) else ()):
                if (
                    isinstance(before, ast.Assign | ast.AnnAssign)
                    and isinstance(each, ast.Expr)
                    and isinstance(each.value, ast.Constant)
                    and isinstance(each.value.value, str)
                ):
                    yield path, each.lineno, each.value.value.strip().splitlines()[0]


def vague_docstrings() -> list[str]:
    """Return the docstrings of modules, classes and functions with a vague first word."""
    return _vague(docstrings())


def vague_attribute_docstrings() -> list[str]:
    """Return the docstrings of constants and fields with a vague first word."""
    return _vague(attribute_docstrings())


def _vague(found: Iterator[tuple[Path, int, str]]) -> list[str]:
    return [
        place(path, line, first)
        for path, line, first in found
        if (words := re.findall(r"[A-Za-z']+", first)) and words[0].lower() in VAGUE_FIRST_WORDS
    ]


def doubled_class_names() -> list[str]:
    """Return the public class names that more than one module of the package defines."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    return [
        f"{name}: {', '.join(files)}" for name, files in sorted(places.items()) if len(files) > 1
    ]


def wide_prose() -> list[str]:
    """Return the Markdown lines wider than 100 columns, without code, tables and links."""
    wide = []
    for path in sorted(ROOT.glob("*.md")) + sorted(
        path
        for folder in ("docs", "deploy", "benchmarks", "examples", "tests")
        for path in (ROOT / folder).rglob("*.md")
    ):
        in_code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.lstrip().startswith("```"):
                in_code = not in_code
            elif (
                len(line) > MAX_COLUMNS
                and not in_code
                and not line.lstrip().startswith("|")
                and "](" not in line
            ):
                wide.append(place(path, number, line[:60]))
    return wide


def _is_forward(function: ast.FunctionDef) -> bool:
    """Whether a method only returns or calls ``self.part.member(...)``."""
    body = [
        node for node in function.body if not isinstance(getattr(node, "value", None), ast.Constant)
    ]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    value = body[0].value
    if isinstance(value, ast.Call):
        value = value.func
    return (
        isinstance(value, ast.Attribute)
        and isinstance(value.value, ast.Attribute)
        and isinstance(value.value.value, ast.Name)
        and value.value.value.id == "self"
    )


def forwards_of_the_ladder() -> list[str]:
    """Return the public members of ``Ladder`` that only forward to one of its parts."""
    path = PACKAGE / "ladder" / "ladder.py"
    return [
        place(path, function.lineno, function.name)
        for node in parse(path).body
        if isinstance(node, ast.ClassDef) and node.name == "Ladder"
        for function in node.body
        if isinstance(function, ast.FunctionDef)
        and not function.name.startswith("_")
        and _is_forward(function)
    ]


def root_modules() -> list[str]:
    """Return the modules that lie directly in the package."""
    return [place(path, 1) for path in sorted(PACKAGE.glob("*.py")) if path.stem != "__init__"]


def small_files_of_one_importer() -> list[str]:
    """Return the modules of at most 70 lines that exactly one other module imports."""
    importers: dict[str, set[Path]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        if path.name == "__init__.py":
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                importers[node.module].add(path)
                for alias in node.names:
                    importers[f"{node.module}.{alias.name}"].add(path)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importers[alias.name].add(path)
    small = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name in ("__init__.py", "__main__.py"):
            continue
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        if num_lines <= SMALL_FILE_LINES and len(importers[module] - {path}) == 1:
            small.append(place(path, num_lines, "lines"))
    return small


def source_lines() -> list[str]:
    """Return one entry per line of the package's Python sources."""
    return [
        place(path, number)
        for path in sorted(PACKAGE.rglob("*.py"))
        for number in range(1, len(path.read_text(encoding="utf-8").splitlines()) + 1)
    ]


COUNTS: dict[str, Callable[[], list[str]]] = {
    "vague_docstrings": vague_docstrings,
    "vague_attribute_docstrings": vague_attribute_docstrings,
    "doubled_class_names": doubled_class_names,
    "wide_prose": wide_prose,
    "ladder_forwards": forwards_of_the_ladder,
    "root_modules": root_modules,
    "small_files_of_one_importer": small_files_of_one_importer,
    "source_lines": source_lines,
}


def main() -> int:
    """Print the counts; return 1 if ``--check`` finds one above its limit."""
    parser = argparse.ArgumentParser(description="Count what makes the sources hard to read.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--list", choices=COUNTS, help="print every place of one count")
    parser.add_argument("--check", action="store_true", help="fail if a count exceeds its limit")
    options = parser.parse_args()
    if options.list:
        print(*COUNTS[options.list](), sep="\n")
        return 0
    names = LIMITS if options.check else COUNTS
    counts = {name: len(COUNTS[name]()) for name in names}
    if options.json:
        print(json.dumps(counts))
    else:
        for name, count in counts.items():
            limit = f"   (at most {LIMITS[name]})" if name in LIMITS else ""
            print(f"{name:30} {count:>6}{limit}")
    exceeded = [name for name in LIMITS if options.check and counts[name] > LIMITS[name]]
    for name in exceeded:
        print(
            f"{name}: {counts[name]} places, at most {LIMITS[name]} are accepted; "
            f"`python scripts/house.py --list {name}` prints them.",
            file=sys.stderr,
        )
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
