"""Stand-in for torchvision, which has no CPU build in the registry.

SGLang imports names from it for models with images, and calls none for other models.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.0"
__path__ = []


class _Words(type):
    """Every attribute of the class is its own name in lower case."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name.lower()


class _Anything(metaclass=_Words):
    """A class for every requested name."""


class _Module(ModuleType):
    __path__ = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


for _name in ("io", "ops", "transforms", "transforms.functional", "transforms.v2",
              "transforms.v2.functional"):  # fmt: skip
    _made = _Module(f"{__name__}.{_name}")
    _made.__spec__ = ModuleSpec(_made.__name__, None, is_package=True)
    sys.modules[_made.__name__] = _made
    _parent, _, _leaf = _made.__name__.rpartition(".")
    setattr(sys.modules[_parent], _leaf, _made)
