"""Identity of code that is in no model's folder: packages by the bytes of all their files.

A version does not identify code that is being worked on, nor a file that was changed where it is
installed. So the packages that are named are read, with local files that they import; packages that
they import from a distribution count with its version.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path
from threading import Event

from blake3 import blake3

from kvtier.identity.content import hash_files, num_threads

CODE = frozenset(
    {".py", ".pyi", ".so", ".pyd", ".dylib", ".cu", ".cuh", ".cpp", ".h", ".hpp", ".cl"}
)
"""Suffixes of sources and of what is compiled from them, at run time by some."""
IMPORTS = re.compile(
    rb"^[ \t]*(?:from[ \t]+([A-Za-z_][\w.]*)[ \t]+import|import[ \t]+([A-Za-z_][\w., \t]*))",
    re.MULTILINE,
)


class UnknownCodeError(Exception):
    """The code that was loaded can't be identified; the message says which and why."""


def code_digest(
    modules: Iterable[str], known: Iterable[str] = (), since_ns: int | None = None
) -> str:
    """Return a digest of the packages that have some modules, and of what these import; hex.

    It imports no module, only the packages around one.

    Args:
        modules: full names.
        known: top-level packages that the caller identifies by other means.
        since_ns: files that changed later may differ from what was loaded.

    Raises:
        UnknownCodeError: a module is in no file, or its files changed.
    """
    skipped = {*sys.stdlib_module_names, *known} - {"__main__"}
    left = [(module, True) for module in modules if module.partition(".")[0] not in skipped]
    installed = packages_distributions() if left else {}
    found: dict[str, object] = {}
    while left:
        module, is_named = left.pop()
        top = module.partition(".")[0]
        if top in skipped or (name := _package_of(module)) in found:
            continue
        owners = [distribution(each) for each in installed.get(top, ())]
        if not is_named and owners and not any(map(_is_editable, owners)):
            found[name] = sorted(f"{owner.name} {owner.version}" for owner in owners)
            continue
        files = _files(name)
        if files is None:
            if is_named:
                raise UnknownCodeError(f"the code of {module!r} is in no file")
            continue  # imported where it is there, or a word in a text
        found[name] = _read(name, files, since_ns)
        sources = (path for path in files.values() if path.suffix == ".py")
        left += [(each, False) for path in sources for each in _imports(path)]
    return blake3(json.dumps(found, sort_keys=True).encode()).hexdigest() if found else ""


def _is_editable(owner: Distribution) -> bool:
    told = json.loads(owner.read_text("direct_url.json") or "{}")
    return bool(told.get("dir_info", {}).get("editable"))


def _package_of(module: str) -> str:
    """Return the outermost package of a module that is no namespace."""
    parts = module.split(".")
    for num in range(1, len(parts)):
        name = ".".join(parts[:num])
        loaded = sys.modules.get(name)
        if getattr(loaded, "__file__", None) is not None:
            return name
        spec = _spec(name)
        if spec is not None and spec.origin is not None:
            return name
    return module


def _spec(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def _files(name: str) -> Mapping[str, Path] | None:
    """Return the code files of a package or module, by their names in it; None without any."""
    loaded = sys.modules.get(name)
    folders = [Path(each) for each in getattr(loaded, "__path__", ())]
    single = getattr(loaded, "__file__", None)
    if loaded is None:
        spec = _spec(name)
        folders = [Path(each) for each in (spec and spec.submodule_search_locations) or ()]
        single = spec.origin if spec is not None and spec.has_location else None
    found = {
        f"{at}/{path.relative_to(folder).as_posix()}": path
        for at, folder in enumerate(folders)
        for path in folder.rglob("*")
        if path.suffix in CODE and path.is_file()
    }
    if not folders and single is not None and Path(single).is_file():
        found = {Path(single).name: Path(single)}
    return found or None


def _read(name: str, files: Mapping[str, Path], since_ns: int | None) -> Mapping[str, str]:
    try:
        if since_ns is not None:
            for path in files.values():
                seen = path.stat()
                if max(seen.st_mtime_ns, seen.st_ctime_ns) > since_ns:
                    raise UnknownCodeError(f"{path} changed after this process began")
        digests = hash_files([*files.values()], num_threads(), Event())
    except OSError as error:
        raise UnknownCodeError(f"the code of {name!r} can't be read ({error})") from error
    return {at: digest.hex() for at, digest in zip(files, digests, strict=True)}


def _imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports by full names, perhaps with words of a text."""
    for one, several in IMPORTS.findall(path.read_bytes()):
        for each in (one or several).decode().split(","):
            words = each.split()
            if words:
                yield words[0]
