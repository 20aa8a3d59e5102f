"""Python sources of vllm-ascend, run a definition at a time, without CANN.

A module of theirs can't be imported: it imports torch_npu, and a vLLM of its own version. Here each
definition that is used is run from the module's file, unchanged but for its annotations. A name
that it needs comes from another module of theirs in the same way, from what is installed, or from
``stand_ins``. Any other name is a NameError, so nothing is made up silently.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGE = "vllm_ascend"
VERSIONS = ("0.18.0", "0.23.0", "0.30.0rc2")
FOLDER = Path(__file__).resolve().parents[4] / ".peers" / "vllm-ascend"
KEPT = {"staticmethod", "classmethod", "property", "dataclass", "cached_property"}
"""Decorators that are run, too."""


class Sources:
    """One release. stand_ins: by name, in the place of what can't be imported here."""

    def __init__(self, version: str, stand_ins: Mapping[str, Any]) -> None:
        self.root = FOLDER / version
        self.stand_ins = stand_ins
        self._modules: dict[str, _Names] = {}

    def module(self, name: str) -> _Names:
        if name not in self._modules:
            self._modules[name] = _Names(self, name)
        return self._modules[name]

    def part(self, module: str, class_name: str) -> type:
        """Return a class with their methods, and without a base; each is run when it is called."""
        names = self.module(module)
        methods = {
            each.name: each
            for each in names.definitions[class_name].body
            if isinstance(each, ast.FunctionDef)
        }

        class Part:
            def __getattr__(self, name: str) -> Any:
                if name not in methods:
                    raise AttributeError(f"{class_name} gets no {name} here")
                function = names.run(methods[name])
                if isinstance(function, staticmethod):
                    return function.__func__
                return function.__get__(self)

        return Part


class _Names(dict[str, Any]):
    """Global names of one module, looked up when they are used."""

    def __init__(self, sources: Sources, name: str) -> None:
        super().__init__(__name__=__name__, __builtins__=builtins)  # dataclasses look there
        self._sources = sources
        path = sources.root / Path(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self._file = str(file)
        self.definitions: dict[str, Any] = {}
        self._imports: dict[str, tuple[str, str | None]] = {}
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            match node:
                case ast.FunctionDef() | ast.ClassDef():
                    self.definitions[node.name] = node
                case (
                    ast.Assign(targets=[ast.Name(id=target)])
                    | ast.AnnAssign(target=ast.Name(id=target))
                ):
                    self.definitions[target] = node
                case ast.Import() | ast.ImportFrom():
                    self.note_import(node)

    def note_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for name in node.names:
            if isinstance(node, ast.Import):
                module = name.name if name.asname else name.name.partition(".")[0]
                self._imports[name.asname or module] = (module, None)
            else:
                self._imports[name.asname or name.name] = (node.module or "", name.name)

    def look_up(self, name: str) -> None:
        """Make a name known, if anything here defines it."""
        if name in self._sources.stand_ins or name in self.definitions or name in self._imports:
            self[name]

    def __missing__(self, name: str) -> Any:
        if name in self._sources.stand_ins:
            self[name] = self._sources.stand_ins[name]
        elif name in self.definitions:
            self[name] = self.run(self.definitions[name])
        elif name in self._imports:
            self[name] = self._imported(*self._imports[name])
        else:
            raise KeyError(name)  # a builtin, or a NameError
        return self[name]

    def _imported(self, module: str, name: str | None) -> Any:
        if module.partition(".")[0] == PACKAGE and name is not None:
            return self._sources.module(module)[name]
        try:
            found = import_module(module)
            return getattr(found, name) if name else found
        except (ImportError, AttributeError) as error:
            raise NameError(f"{self._file}: {name} of {module} is not here: {error}") from error

    def run(self, node: ast.stmt) -> Any:
        """Run one definition, and return what it defines."""
        tree = ast.Module([_Bare(self).visit(node)], [])
        ast.fix_missing_locations(tree)
        for name in _names_at_once(node):  # the interpreter does not call ``__missing__`` there
            self.look_up(name)
        made: dict[str, Any] = {}
        exec(compile(tree, self._file, "exec"), self, made)
        (found,) = made.values()
        return found


class _Bare(ast.NodeTransformer):
    """Functions without annotations, decorators of engines, and imports of their own package.

    Names that such an import makes known are global names then.
    """

    def __init__(self, names: _Names) -> None:
        self._names = names

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        if (node.module or "").split(".")[0] != PACKAGE:
            return node
        self._names.note_import(node)
        return ast.copy_location(ast.Pass(), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns = None
        node.decorator_list = [each for each in node.decorator_list if _name(each) in KEPT]
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node


def _names_at_once(node: ast.AST) -> set[str]:
    """Return the names that a definition uses when it is run, which bodies of functions are not."""
    used: list[ast.AST]
    if isinstance(node, ast.FunctionDef):
        used = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
    elif isinstance(node, ast.Lambda):
        used = []
    else:
        used = list(ast.iter_child_nodes(node))
    names = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set()
    return names.union(*map(_names_at_once, used))


def _name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.id if isinstance(node, ast.Name) else ""
