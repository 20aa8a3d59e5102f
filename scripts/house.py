"""Measure the language and the structure of the sources: counts that a reader feels.

Run it from anywhere: ``python scripts/house.py`` prints a table, ``--json`` one JSON object (with
the lines of each folder, the classes on the walks of docs/architecture.md and the language of each
room besides), and ``--list NAME`` every place that is counted under one name. ``make lint`` runs it
with ``--check``, which fails if a count exceeds its limit in ``LIMITS``.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
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

# Turns of speech whose subject a reader has to guess: a rate per 1,000 words of docstring.
IDIOMS = re.compile(
    r"\b(?:tells?|told|telling|say|says|said|asks?|asked|whoever|nobody|somebody|everybody"
    r"|those (?:that|who|whose)|what (?:comes|is there|there is)|(?:it|they|which) comes?"
    r"|all the same|in vain|for good|lets? go|gives? back|goes its|as ever|yet to be)\b",
    re.IGNORECASE,
)
MAX_IDIOMS = 3.0
"""Turns per 1,000 words that every room is to reach."""
MIN_WORDS = 300
"""Rooms with fewer words have no rate: one turn would be many."""
IDIOM_LIMITS: dict[str, float] = {}
"""Rooms that are above it. Lower a number when its room improves; never raise it."""

# The largest count that `--check` accepts. Lower a limit when its count falls; never raise it.
LIMITS: dict[str, int] = {
    "vague_docstrings": 0,
    "vague_attribute_docstrings": 0,
    "doubled_class_names": 1,
    "wide_prose": 0,
    "small_files_of_one_importer": 17,
    "protected_accesses": 0,
    "siblings": 15,
    "rooms_of_idioms": 0,
}


def python_files() -> Iterator[Path]:
    """Yield every Python file of the repository's own sources, sorted by path."""
    for folder in PYTHON_FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree."""
    return tuple(ast.walk(parse(path)))


def place(path: Path, line: int, text: str = "") -> str:
    """Return ``path:line: text`` with a path relative to the repository."""
    return f"{path.relative_to(ROOT)}:{line}: {text}".rstrip(": ")


def docstrings() -> Iterator[tuple[Path, int, str]]:
    """Yield (file, line, text) of every docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in python_files():
        for node in nodes(path):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield path, getattr(node, "lineno", 1), text


def attribute_docstrings() -> Iterator[tuple[Path, int, str]]:
    """Yield (file, line, text) of every string that documents the assignment before it."""
    for path in python_files():
        for node in nodes(path):
            body = getattr(node, "body", None)
            for before, each in pairwise(body if isinstance(body, list) else ()):
                if (
                    isinstance(before, ast.Assign | ast.AnnAssign)
                    and isinstance(each, ast.Expr)
                    and isinstance(each.value, ast.Constant)
                    and isinstance(each.value.value, str)
                ):
                    yield path, each.lineno, each.value.value.strip()


def vague_docstrings() -> list[str]:
    """Return the docstrings of modules, classes and functions with a vague first word."""
    return _vague(docstrings())


def vague_attribute_docstrings() -> list[str]:
    """Return the docstrings of constants and fields with a vague first word."""
    return _vague(attribute_docstrings())


def _vague(found: Iterator[tuple[Path, int, str]]) -> list[str]:
    return [
        place(path, line, text.partition("\n")[0])
        for path, line, text in found
        if (word := re.search(r"[A-Za-z']+", text)) and word[0].lower() in VAGUE_FIRST_WORDS
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


def small_files_of_one_importer() -> list[str]:
    """Return the modules of at most 70 lines that exactly one other module imports."""
    importers: dict[str, set[Path]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        if path.name == "__init__.py":
            continue
        for node in nodes(path):
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


def siblings() -> list[str]:
    """Return the packages that lie directly in the package."""
    return [place(path.parent, 1) for path in sorted(PACKAGE.glob("*/__init__.py"))]


def _is_protected(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def _protected_members(path: Path) -> frozenset[str]:
    """Return the protected names that a module defines: functions, classes, fields, variables."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            names.add(node.attr)
    return frozenset(name for name in names if _is_protected(name))


# Protected names of engines, torch and the standard library that kvtier's own modules use as well.
FOREIGN_MEMBERS = frozenset(
    {
        *("KVConnectorFactory._registry", "scheduler._jobs"),
        *("tensor._version", "self._library._name"),
    }
)
PUBLIC_OF_NAMED_TUPLES = frozenset({"_asdict", "_fields", "_make", "_replace"})


def protected_accesses() -> list[str]:
    """Return the accesses to a protected member that another module of the package defines.

    Accesses by `self` and `cls` are of a class's own (or inherited) members. Members that no module
    of the package defines belong to an engine or a library.
    """
    modules = sorted(PACKAGE.rglob("*.py"))
    known = frozenset().union(*map(_protected_members, modules)) - PUBLIC_OF_NAMED_TUPLES
    return [
        place(path, node.lineno, text)
        for path in modules
        for foreign in [known - _protected_members(path)]
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr in foreign
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and (text := ast.unparse(node)) not in FOREIGN_MEMBERS
    ]


def _room(path: Path) -> str:
    """Return the folder whose language is measured together: a package or a connector."""
    parts = path.relative_to(ROOT).parts[:-1]
    depth = 4 if parts[2:3] == ("connectors",) else 3 if parts[0] == "src" else 2
    return "/".join(parts[:depth])


def _texts() -> Iterator[tuple[Path, int, str]]:
    """Yield (file, line, text) of every docstring, and of every comment of the native core."""
    yield from docstrings()
    for path in sorted((ROOT / "native").rglob("*.[ch]pp")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if "//" in line:
                yield path, number, line.partition("//")[2]


def idioms() -> list[str]:
    """Return the idiomatic turns in docstrings, and in comments of the native core."""
    return [
        place(path, line, found.group())
        for path, line, text in _texts()
        for found in IDIOMS.finditer(text)
    ]


@cache
def idiom_rates() -> dict[str, float]:
    """Return idiomatic turns per 1,000 words of docstring, by room."""
    words: Counter[str] = Counter()
    turns: Counter[str] = Counter()
    for path, _, text in _texts():
        room = _room(path)
        words[room] += len(text.split())
        turns[room] += len(IDIOMS.findall(text))
    return {
        room: round(1000 * turns[room] / words[room], 1)
        for room in sorted(words)
        if words[room] >= MIN_WORDS
    }


def rooms_of_idioms() -> list[str]:
    """Return the rooms with more idiomatic turns than their limit."""
    return [
        f"{room}: {rate} idiomatic turns per 1,000 words, at most {limit}"
        for room, rate in idiom_rates().items()
        if rate > (limit := IDIOM_LIMITS.get(room, MAX_IDIOMS))
    ]


def _lines(folder: str, pattern: str) -> int:
    return sum(
        len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / folder).rglob(pattern)
    )


def classes_on_walks() -> dict[str, int]:
    """Return the classes named on each walk to the disk of docs/architecture.md, by its title."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("walks to the disk\n")[2].partition("\n## ")[0]
    walks = re.findall(r"^\*\*(.+?)\*\*(.*?)(?=^\*\*|\Z)", section, re.MULTILINE | re.DOTALL)
    return {title: len(set(re.findall(r"`([A-Z]\w*[a-z]\w*)[.`]", text))) for title, text in walks}


def figures() -> dict[str, object]:
    """Return what has no places to list: lines by folder, and the language of each room."""
    return {
        "lines": {
            "src": _lines("src", "*.py"),
            "native": _lines("native", "*.[ch]pp"),
            "tests": _lines("tests", "*.py"),
            "benchmarks": _lines("benchmarks", "*.py"),
        },
        "classes_on_walks": classes_on_walks(),
        "idioms_per_1000_words": idiom_rates(),
    }


COUNTS: dict[str, Callable[[], list[str]]] = {
    "vague_docstrings": vague_docstrings,
    "vague_attribute_docstrings": vague_attribute_docstrings,
    "doubled_class_names": doubled_class_names,
    "wide_prose": wide_prose,
    "small_files_of_one_importer": small_files_of_one_importer,
    "protected_accesses": protected_accesses,
    "siblings": siblings,
    "idioms": idioms,
    "rooms_of_idioms": rooms_of_idioms,
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
        print(json.dumps(counts | figures(), indent=2))
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
