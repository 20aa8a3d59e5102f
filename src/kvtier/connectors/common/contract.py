"""Facts about an engine that a connector relies on, and how the installed engine differs.

Between versions of an engine methods move, take more, or go. So everything that a connector
overrides, calls, builds or reads is written down, and compared with the engine's sources, without
importing them: ``kvtier doctor`` and an engine's own process can afford it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from kvtier.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Takes:
    """A method's parameters without ``self``.

    ``=`` behind those that have a default, or may be left out by one version.
    """

    parameters: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each for each in self.parameters.split(", ") if each)


@dataclass(frozen=True)
class Contract:
    """With one engine. name: for people. package: that is imported.

    oldest, newest: of the versions whose sources have all of it. run_with: versions that the tests
    were run under. overridden: what the engine calls, and the connector has its own: what may be
    passed must be known. called: by the connector: they must take what it passes, and want nothing
    more. built: from the fields named, in this order. read: fields, attributes and members. files:
    where these classes are, inside the package. optional: classes, and members as ``Class.member``,
    that not all of these versions have: kvtier does without. options: of the engine's command line,
    that kvtier prints or its guides name; not compared by ``differences``, for an engine without
    one of them says so itself.
    """

    name: str
    package: str
    oldest: str
    newest: str
    run_with: tuple[str, ...]
    files: tuple[str, ...]
    overridden: Mapping[str, Mapping[str, Takes]] = field(default_factory=dict)
    called: Mapping[str, Mapping[str, Takes]] = field(default_factory=dict)
    built: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    read: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    options: tuple[str, ...] = ()

    @property
    def classes(self) -> list[str]:
        """All that are in it."""
        return list(dict.fromkeys((*self.overridden, *self.called, *self.built, *self.read)))

    def installed(self) -> Path | None:
        """The folder of the engine that would be imported; None where there is none."""
        try:
            spec = find_spec(self.package)
        except ValueError:  # a stand-in without a spec
            return None
        places = spec.submodule_search_locations if spec else None
        return Path(next(iter(places))) if places else None

    def was_run_with(self, version: str) -> bool:
        """Whether the tests were run under ``version``, or another patch of it."""
        return any(f"{version}.".startswith(f"{each}.") for each in self.run_with)

    def covers(self, version: str) -> bool:
        """Whether a version is one of those from ``oldest`` to ``newest``."""
        found, oldest, newest = map(_numbers, (version, self.oldest, self.newest))
        return oldest <= found and found[: len(newest)] <= newest

    def differences(self, folder: Path | None = None) -> list[str]:
        """One sentence for each thing that is not as kvtier knows it; empty where all is.

        folder: of an engine; the one installed if None. Raises nothing for what the sources
        contain.
        """
        folder = folder or self.installed()
        if folder is None:
            return [f"{self.name} is not installed"]
        found = f"{self.name} {version_of(folder)}"
        advice = f"use {self.name} {self.oldest} to {self.newest}, or a newer kvtier"
        sources = Sources(folder, self.files)
        return [f"{found}: {each}: {advice}" for each in _compare(self, sources)]

    def require(self, folder: Path | None = None) -> None:
        """Raises ``ConfigError`` with all differences, where there are any."""
        if found := self.differences(folder):
            raise ConfigError(f"kvtier can't serve this {self.name}:\n  " + "\n  ".join(found))


def _numbers(version: str) -> list[int]:
    """Return the numbers in front of whatever else a version has."""
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(each) for each in found[0].split(".")] if found else []


def version_of(folder: Path) -> str:
    """An engine's own version: its distribution may have another name on each kind of device."""
    try:
        tree = ast.parse((folder / "_version.py").read_text())
    except (OSError, SyntaxError):
        return "of unknown version"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if names & {"__version__", "version"} and isinstance(node.value.value, str):
                return node.value.value
    return "of unknown version"


def _compare(contract: Contract, sources: Sources) -> Iterator[str]:
    there, optional = sources.classes, contract.optional
    for name in contract.classes:
        if name not in there and name not in optional:
            yield f"there is no {name} where kvtier knows it"
    for table, says, fits in (
        (contract.overridden, "kvtier knows", _is_known),
        (contract.called, "kvtier gives it", _is_enough),
    ):
        for name, methods in table.items():
            for method, takes in methods.items() if name in there else ():
                found = sources.parameters(name, method)
                if found is None:
                    if f"{name}.{method}" not in optional:
                        yield f"{name} has no {method}"
                elif not fits(found, takes.names):
                    yield f"{name}.{method} takes ({_show(found)}); {says} ({takes.parameters})"
    for name, methods in contract.overridden.items():
        for method in sources.unfinished(name):
            if method not in methods:
                yield f"{name} wants {method}, which kvtier has not"
    for name, fields in contract.built.items():
        made_of = sources.fields(name)
        if name in there and not _is_enough(made_of, fields):
            yield f"{name} is made of ({_show(made_of)}); kvtier gives it ({', '.join(fields)})"
    for name, attributes in contract.read.items():
        known = sources.attributes(name)
        missing = [
            each for each in attributes if each not in known and f"{name}.{each}" not in optional
        ]
        if name in there and missing:
            yield f"{name} has no {', '.join(missing)}"


def _is_known(found: Mapping[str, bool], names: Sequence[str]) -> bool:
    """Whether a method takes what kvtier knows: in order, nothing unknown, all that is required."""
    num_required = sum(not name.endswith(("=", "**")) for name in names)
    known = [name.rstrip("=") for name in names]
    return list(found) == known[: len(found)] and len(found) >= num_required


def _is_enough(found: Mapping[str, bool], given: Sequence[str]) -> bool:
    """Whether ``given`` are the first parameters that are found, and all that have no default."""
    wanted = {name for name, has_default in found.items() if not has_default}
    return list(found)[: len(given)] == list(given) and wanted <= set(given)


def _show(parameters: Mapping[str, bool]) -> str:
    return ", ".join(f"{name}=" if default else name for name, default in parameters.items())


@dataclass(frozen=True)
class Sources:
    """An engine's classes, as they are written in ``files``."""

    folder: Path
    files: tuple[str, ...]

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """By name. A file that is missing or can't be read has none."""
        found: dict[str, ast.ClassDef] = {}
        for file in self.files:
            try:
                body = ast.parse((self.folder / file).read_text()).body
            except (OSError, SyntaxError):
                continue
            found.update((node.name, node) for node in body if isinstance(node, ast.ClassDef))
        return found

    def family(self, name: str) -> list[ast.ClassDef]:
        """A class, and those of its bases that are known here, nearest first."""
        node = self.classes.get(name)
        if node is None:
            return []
        bases = (base.id for base in node.bases if isinstance(base, ast.Name))
        return [node, *(each for base in bases for each in self.family(base))]

    def functions(self, name: str) -> Iterator[ast.FunctionDef]:
        """Methods and properties, nearest first."""
        for node in self.family(name):
            yield from (each for each in node.body if isinstance(each, ast.FunctionDef))

    def parameters(self, name: str, method: str) -> dict[str, bool] | None:
        """Return a method's parameters without ``self``, and which have defaults.

        ``**`` if it takes any. None if there is no such method.
        """
        for function in self.functions(name):
            if function.name == method:
                given = function.args
                names = [each.arg for each in (*given.posonlyargs, *given.args)][1:]
                num_required = len(names) - len(given.defaults)
                found = {name: place >= num_required for place, name in enumerate(names)}
                for kwonlyarg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
                    found[kwonlyarg.arg] = default is not None
                return found | ({"**": False} if given.kwarg else {})
        return None

    def unfinished(self, name: str) -> list[str]:
        """Methods that a subclass has to bring."""
        nearest: dict[str, ast.FunctionDef] = {}
        for function in self.functions(name):
            nearest.setdefault(function.name, function)
        return [
            each.name
            for each in nearest.values()
            if any("abstract" in ast.unparse(mark) for mark in each.decorator_list)
        ]

    def fields(self, name: str) -> dict[str, bool]:
        """A dataclass's fields in their order, and whether each has a default."""
        found: dict[str, bool] = {}
        for node in reversed(self.family(name)):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    written = ast.unparse(each)
                    if "ClassVar" not in written and "init=False" not in written:
                        found[each.target.id] = each.value is not None
        return found

    def attributes(self, name: str) -> set[str]:
        """Fields, members, properties, and what ``__init__`` sets."""
        found: set[str] = set()
        for node in self.family(name):
            for each in ast.walk(node):
                if isinstance(each, ast.FunctionDef):
                    found.add(each.name)
                elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                    found.add(each.attr)
                elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                    found.add(each.id)
        return found
