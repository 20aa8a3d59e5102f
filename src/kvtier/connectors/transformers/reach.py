"""Everything that the forward of a model can reach, by a walk over objects and code.

The rule: an object is part of the digest, or the KV of the model is not shared with other
processes (``local``), or its calls are passed through (``opaque``). Nothing is skipped because
its kind is unknown.

The walk begins at the modules. From an object it goes to its attributes, its items and its class;
from a class to its functions; from a function to its closure, its defaults, and the globals that
its code names. It ends at the standard library and at torch, whose versions are part of the name
of KV; of these the functions that are named are still compared, since they can be replaced. In
transformers it goes on through the files that hold models (``COMPUTES_NOTHING`` lists the others).
"""

from __future__ import annotations

import _thread
import array
import builtins
import contextvars
import dataclasses
import dis
import functools
import inspect
import itertools
import logging
import mmap
import os
import pickle
import re
import sys
import types
import typing
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from transformers import PreTrainedModel

from kvtier.connectors.transformers.watch import MISSING, Watch

KNOWN_HOOKS = ("transformers.", "accelerate.")
"""Packages whose forward hooks change nothing."""
DROPOUT = torch.nn.modules.dropout._DropoutNd
"""Base of all dropouts. Adapters bring some, which ``model.eval()`` may have missed."""
MAX_OBJECTS = 500_000
"""Objects of one model. A model that reaches more reaches what is not its own."""

UNTOLD = frozenset({
    "_hf_peft_config_loaded", "_is_hf_initialized", "_output_capturing_hooks_installed",
    "_name_or_path", "_original_object_hash", "generation_config", "name_or_path", "peft_config",
    "rope_deltas", "transformers_version", "use_cache", "warnings_issued",
})  # fmt: skip
"""Attributes of models and configurations that change no KV, and may differ in each process.

``rope_deltas`` are of the last prompt with images; prompts are computed with given positions.
"""
MODULE_PARTS = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes of every module: its tensors, its modules and its hooks."""
CLASS_PARTS = frozenset({
    "__abstractmethods__", "__annotations__", "__dataclass_fields__", "__dataclass_params__",
    "__dict__", "__doc__", "__module__", "__orig_bases__", "__parameters__", "__signature__",
    "__slotnames__", "__weakref__", "_abc_impl",
})  # fmt: skip
"""Attributes of a class that say nothing about what its functions compute."""

REPLACED_BY_TORCH = frozenset({"___needs_generation_tag_patch", "__init__", "__setstate__"})
"""Attributes of ``torch.nn.Module`` that torch.compile replaces. Computing a prompt calls none."""
FUNCTION_PARTS = frozenset({"__signature__", "_torchdynamo_wrapper_id"})
"""Attributes of functions that differ in each process, or say nothing."""

COMPUTES_NOTHING = (
    "torch.nn.modules.module", "transformers.configuration_utils", "transformers.distributed",
    "transformers.generation", "transformers.integrations.accelerate",
    "transformers.integrations.deepspeed", "transformers.integrations.fsdp",
    "transformers.integrations.peft", "transformers.integrations.tensor_parallel",
    "transformers.loss", "transformers.modeling_outputs", "transformers.modeling_utils",
    "transformers.models.auto", "transformers.utils",
)  # fmt: skip
"""Python modules around the forward of a model: loading, saving, checks, decoding."""
NOT_COMPUTED = frozenset({
    "FuncTorchBatched", "FuncTorchDynamicLayerFrontMode", "MPS", "Meta", "PythonTLSSnapshot",
})  # fmt: skip
"""Dispatch keys that torch itself fills, some only when they are first used: of tracing, of vmap,
and of Apple's devices."""
TORCHS_OWN = os.path.join(os.path.dirname(torch.__file__), "_native", "").encode()
"""Folder of the implementations in Python that torch has for some operators and devices."""
FOLLOWED_IN_TORCH = ("torch.nn.modules", "torch.nn.functional")
LOOKS_UP = frozenset({"__import__", "eval", "exec", "globals", "import_module", "open"})
"""Functions by which code reaches what it does not name."""

PLAIN = frozenset(
    {
        bool,
        bytes,
        complex,
        float,
        int,
        range,
        str,
        torch.Size,
        torch.device,
        torch.dtype,
        torch.layout,
        torch.memory_format,
        type(NotImplemented),
        types.EllipsisType,
        types.NoneType,
    }
)
"""Types whose values never change, and are known by their representation."""
INERT: tuple[type, ...] = (
    _thread.LockType,
    _thread.RLock,
    dataclasses.Field,
    inspect.Signature,
    logging.Handler,
    logging.Logger,
    types.GenericAlias,
    types.UnionType,
    typing.TypeVar,
)
"""Types whose values change nothing that is computed."""
OPERATORS = (np.ufunc, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
BUFFERS = (array.array, bytearray, memoryview, mmap.mmap, np.generic, np.ndarray)
NAMED: tuple[type, ...] = (
    types.BuiltinFunctionType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)
"""Functions and descriptors that are compiled, and known by their names."""
STANDARD = frozenset({*sys.stdlib_module_names, "kvtier", "numpy", "torch"})
STANDARD_FOLDER = os.path.dirname(os.__file__)


class ModelReach:
    """Everything that the forward of a model reaches, at one time.

    Attributes:
        digest: of all that was found, but the tensors; equal in every process.
        tensors: all tensors, by name.
        odd: why nothing can be reused while it is so, or "": hooks, dropouts.
        opaque: an object that may change unnoticed, or "". Calls are passed through.
        local: why only this process can find the KV, or "".
        here: addresses of the objects that are known by their identity only.
    """

    def __init__(self, model: PreTrainedModel, forward: Callable[..., Any] | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.odd = ""
        self.opaque = ""
        self.local = ""
        self.here: list[int] = []
        self._watch = Watch()
        self._lines: list[str] = []
        self._numbers: dict[int, str] = {}
        self._kept: list[object] = []  # so that no address is used twice
        self._queue: deque[tuple[str, Any, bool]] = deque()
        self._named: set[str] = set()
        self._methods: set[int] = set()  # of libraries: read when a name calls for them
        self._unnamed: dict[str, list[types.FunctionType]] = {}
        self._bound: set[tuple[int, str]] = set()
        self._codes: dict[int, str] = {}
        self._model = model
        self._forward = model.forward if forward is None else forward
        self._walk()
        self.digest = blake3("\n".join(self._lines).encode(errors="surrogatepass")).digest()
        self._watch.freeze()
        del self._queue, self._lines, self._numbers, self._codes, self._unnamed

    def is_same(self) -> bool:
        """Whether a walk would find the same. Contents of tensors are not compared."""
        return self._watch.is_same()

    # -- the walk ----------------------------------------------------------------------------------

    def _walk(self) -> None:
        for name in ("forward", "__call__", "_call_impl", "_wrapped_call_impl"):
            self._name(name)
        # Operators of tensors are methods of these, which can be replaced as well.
        for kind in (torch.Tensor, torch._C.TensorBase):
            self._class(kind, is_described=True)
        self._module("", self._model)
        self._tell("forward", self._value("forward", self._forward))
        self._operators()
        while self._queue:
            path, value, is_library = self._queue.popleft()
            if len(self._kept) > MAX_OBJECTS:
                self.opaque = self.opaque or "it reaches too many objects"
                return
            self._content(path, value, is_library)

    def _operators(self) -> None:
        """Describe torch's own implementations in Python. With any other the model is opaque."""
        known: set[str] = getattr(torch.library, "_impls", set())
        self._watch.content(lambda: len(known).to_bytes(8, "little"))
        for key in sorted(known):
            library, operator, device = [*key.split("/"), "", ""][:3]
            if library != "aten" or device in NOT_COMPUTED:
                continue
            if not _registered_at(operator, device).startswith(TORCHS_OWN):
                self.opaque = f"the operator {operator} has another implementation"
                return
            self._tell("operator", operator, device)
            # Another implementation over torch's own leaves their number as it is.
            self._watch.content(functools.partial(_registered_at, operator, device))

    def _tell(self, *parts: str) -> None:
        self._lines.append(" ".join(parts))

    def _value(self, path: str, value: Any, is_library: bool = False) -> str:
        """Return a description of a value. What is in it is added to the queue."""
        if type(value) in PLAIN:
            return repr(value)
        if (number := self._numbers.get(id(value))) is None:
            number = self._numbers[id(value)] = f"#{len(self._kept)}"
            self._kept.append(value)
            self._queue.append((path, value, is_library))
        return number

    def _keep_here(self, value: object, reason: str) -> None:
        """Note an object that another process can't know."""
        self.local = self.local or reason
        self.here.append(id(value))

    def _items(self, path: str, items: Iterable[tuple[object, Any]], is_library: bool) -> None:
        for key, value in items:
            name = f"{path}[{key!r}]" if type(key) in PLAIN else path
            self._tell(self._value(path, key, is_library), self._value(name, value, is_library))

    def _content(self, path: str, value: Any, is_library: bool) -> None:
        """Describe what an object consists of, and watch it."""
        kind = type(value)
        self._tell(self._numbers[id(value)], f"{kind.__module__}.{kind.__qualname__}")
        if isinstance(value, Enum):
            self._tell(str(value._name_))
            self._attributes(path, value, is_library)
        elif isinstance(value, torch.nn.Module):
            self._module(f"{path}.", value)
        elif isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.MethodType):
            self._parts(path, is_library, value.__func__, value.__self__)
        elif isinstance(value, NAMED):
            self._compiled(path, value, is_library)
        elif isinstance(value, types.ModuleType):
            self._tell(value.__name__)
            self._python_module(value, {*self._named}, is_library)
        elif isinstance(value, dict | types.MappingProxyType):
            self._watch.mapping(value)
            items = dict.items(value) if isinstance(value, dict) else value.items()
            self._items(path, items, is_library)
            if isinstance(value, defaultdict):
                self._watch.references(lambda: [value.default_factory])
                self._parts(path, is_library, value.default_factory)
            self._subclass(path, value, is_library, dict, OrderedDict, types.MappingProxyType)
        elif isinstance(value, list | tuple | deque):
            if isinstance(value, list):
                self._watch.sequence(value)
            elif isinstance(value, deque):
                self._watch.references(lambda: [*value])
            self._items(path, enumerate(kind.__iter__(value)), is_library)
            self._subclass(path, value, is_library, list, tuple, deque)
        elif isinstance(value, set | frozenset):
            self._watch.references(lambda: [*value])
            found = sorted(value, key=lambda item: (type(item).__qualname__, _sort_key(item)))
            self._items(path, enumerate(found), is_library)
            self._subclass(path, value, is_library, set, frozenset)
        elif isinstance(value, BUFFERS):
            self._buffer(path, value)
            if hasattr(value, "__dict__"):  # of a subclass: a mask, for instance
                self._attributes(path, value, is_library)
        elif isinstance(value, INERT) or kind.__module__ == "typing":
            pass
        elif isinstance(value, OPERATORS):
            self._tell(str(value))
            if not is_library and not str(value).startswith(("aten.", "prims.", "<ufunc")):
                self._keep_here(value, f"{path} is an operator of its own")
        elif isinstance(value, types.CodeType):
            self._tell(self._code(value))
        elif (parts := _parts(value)) is not None:
            self._parts(path, is_library, *parts)
        elif isinstance(value, types.CellType | weakref.ref | contextvars.ContextVar):
            read = _reader(value)
            self._watch.references(read)
            self._parts(path, is_library, *read())
        elif isinstance(value, torch.ScriptObject):
            self._keep_here(value, f"{path} is packed")
        elif is_library and _is_standard(kind.__module__) and kind is not types.SimpleNamespace:
            pass  # locks, patterns, caches and the like of a library
        else:
            self._object(path, value, is_library)

    def _parts(self, path: str, is_library: bool, *parts: Any) -> None:
        self._tell(*(self._value(path, part, is_library) for part in parts))

    def _subclass(self, path: str, value: Any, is_library: bool, *plain: type) -> None:
        """Describe what a subclass of a container adds."""
        if type(value) not in plain and not _is_standard(type(value).__module__):
            self._attributes(path, value, is_library)

    def _compiled(self, path: str, value: Any, is_library: bool) -> None:
        name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
        owner = getattr(value, "__self__", None)
        module = getattr(value, "__module__", None) or ""
        self._tell(f"{module}.{name}")
        # The owner of a function of pybind11 is its own record.
        is_bound = type(owner).__name__ != "PyCapsule" and "pybind11" not in type(owner).__module__
        if owner is not None and is_bound and not isinstance(owner, types.ModuleType):
            self._parts(path, is_library, owner)
        if module and not _is_standard(module):
            self._keep_here(value, f"{path} is compiled code of {module}")

    def _buffer(self, path: str, value: Any) -> None:
        """Describe an object that holds bytes. It has no version, so the bytes are read."""

        def read() -> bytes:
            if isinstance(value, np.ndarray | np.generic):
                shape, held = f"{value.dtype.descr} {value.shape}", np.ascontiguousarray(value)
                return shape.encode() + held.tobytes()
            return memoryview(value).tobytes()

        self._bytes(read, f"{path} is a {type(value).__name__} that can't be read")
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            self.opaque = self.opaque or f"{path} is an array of objects"

    def _bytes(self, read: Callable[[], bytes], problem: str) -> None:
        """Describe an object by its bytes. problem: what is so if they can't be read."""

        def digest() -> bytes:
            return blake3(read()).digest()

        try:
            self._watch.content(digest)
            self._tell(digest().hex())
        except Exception:  # of any kind: an object's own code may run
            self.opaque = self.opaque or problem

    def _object(self, path: str, value: Any, is_library: bool) -> None:
        """Describe an object by its class and its attributes."""
        kind = type(value)
        made_in_c = next(base for base in kind.__mro__ if not _is_of_python(base))
        if made_in_c is object or kind is types.SimpleNamespace:
            self._attributes(path, value, is_library)
            return
        self._class(kind)
        name = f"{kind.__module__}.{kind.__qualname__}"
        problem = f"{path} is a {name}, whose state can't be read"
        self._bytes(functools.partial(pickle.dumps, value), problem)

    def _attributes(self, path: str, value: Any, is_library: bool) -> None:
        kind = type(value)
        self._watch.class_of(value)
        self._tell(self._value(f"{path}.__class__", kind))
        is_setting = hasattr(kind, "to_diff_dict")  # a configuration
        if hasattr(value, "__dict__"):
            self._watch.mapping(vars(value))
            untold = UNTOLD if is_setting else frozenset()
            self._named_values(path, vars(value), untold, is_library)
        slots = [
            slot
            for base in kind.__mro__
            if _is_of_python(base)
            for slot in vars(base).values()
            if isinstance(slot, types.MemberDescriptorType)
        ]
        if slots:

            def read() -> list[object]:
                return [_slot(value, slot) for slot in slots]

            self._watch.references(read)
            for slot, held in zip(slots, read(), strict=True):
                if held is not MISSING:
                    name = slot.__name__
                    self._tell(name, self._value(f"{path}.{name}", held, is_library))

    def _named_values(
        self, path: str, values: Mapping[str, Any], but: frozenset[str], is_library: bool
    ) -> None:
        """Describe attributes, sorted by name, since their own order has no meaning."""
        for name in sorted(values, key=str):
            if name not in but:
                value = values[name]
                self._tell(str(name), self._value(f"{path}.{name}", value, is_library))

    # -- modules and tensors -----------------------------------------------------------------------

    def _module(
        self, path: str, module: torch.nn.Module, but: frozenset[str] = frozenset()
    ) -> None:
        """Describe a module and those in it, without what has one of the names ``but``.

        path: its name, with a dot at its end.
        """
        if id(module) not in self._numbers:
            self._numbers[id(module)] = f"#{len(self._kept)}"
            self._kept.append(module)
        self._tell(path, self._numbers[id(module)], self._value(path, type(module)))
        self._watch.class_of(module)
        held = vars(module)
        self._watch.mapping(held)
        if isinstance(module, DROPOUT) and module.training and module.p:
            self.odd = self.odd or "a dropout is in training mode"
        for part in ("_forward_hooks", "_forward_pre_hooks"):
            self._watch.mapping(held[part])
            if has_hooks(held[part].values()):
                self.odd = self.odd or "forward hooks"
        idle = _idle_adapters(module)
        untold = MODULE_PARTS | UNTOLD
        if module is self._model:
            untold |= {"forward", "kvtier"}  # kvtier's own
        for name in sorted(held):
            value = held[name]
            if name in untold:
                continue
            if (idle or but) and isinstance(value, dict):
                self._watch.mapping(value)
                self._tell(name)
                used = [(key, item) for key, item in value.items() if key not in idle | but]
                self._items(path + name, used, is_library=False)
            else:
                self._tell(name, self._value(path + name, value))
        for part in ("_parameters", "_buffers"):
            self._watch.mapping(held[part])
            for name, tensor in held[part].items():
                if tensor is not None and name not in but:
                    self._tell(name, self._value(path + name, tensor))
        self._watch.mapping(held["_modules"])
        for name, inner in held["_modules"].items():
            if inner is None or name in but:
                continue
            if id(inner) in self._numbers:
                self._tell(name, self._numbers[id(inner)])
            else:
                is_by_adapter = hasattr(inner, "keys")
                self._module(f"{path}{name}.", inner, idle if is_by_adapter else frozenset())

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        """Note a tensor. Its bytes are read by others; its attributes may be anything."""
        self.tensors[path] = tensor
        self._watch.class_of(tensor)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            self._tell(self._value(f"{path}.__class__", type(tensor)))
        if held := getattr(tensor, "__dict__", None):
            self._named_values(path, held, UNTOLD, is_library=False)
        if held is not None:
            self._watch.mapping(held)

    # -- code --------------------------------------------------------------------------------------

    def _class(self, kind: type, is_described: bool = False) -> None:
        """Describe the functions of a class, and of its bases."""
        path = f"{kind.__module__}.{kind.__qualname__}"
        bases = (self._value(f"{path}.__bases__", base) for base in kind.__bases__)
        self._tell(path, *bases)
        is_of_models = kind.__module__.startswith(FOLLOWED_IN_TORCH)
        if _is_standard(kind.__module__) and not (is_of_models or is_described):
            return
        self._watch.bases(kind)
        self._watch.mapping(vars(kind))
        self._watch.class_of(kind)
        is_library = _is_library(kind.__module__)
        self._parts(f"{path}.__class__", is_library, type(kind))
        if is_library:
            functions = (held for held in vars(kind).values() if inspect.isfunction(held))
            self._methods.update(map(id, functions))
        untold = CLASS_PARTS | REPLACED_BY_TORCH if is_of_models else CLASS_PARTS
        self._named_values(path, vars(kind), untold, is_library)

    def _function(self, path: str, function: types.FunctionType) -> None:
        """Describe a function: its code, and what it is bound to."""
        module = str(function.__globals__.get("__name__"))
        is_library = _is_library(module, function.__code__.co_filename)
        self._watch.function(function)
        name = f"{module}.{function.__qualname__}"
        self._tell(name, self._code(function.__code__))
        bound = (function.__defaults__, function.__kwdefaults__, function.__closure__)
        self._parts(name, is_library, *bound)
        self._watch.mapping(function.__dict__)
        self._named_values(name, function.__dict__, FUNCTION_PARTS, is_library)
        if isinstance(function.__kwdefaults__, dict):
            self._watch.mapping(function.__kwdefaults__)
        is_special = function.__name__.startswith("__")
        is_called = function.__name__ in self._named or is_special
        if not is_library or is_called or id(function) not in self._methods:
            self._follow(function)
        else:
            self._unnamed.setdefault(function.__name__, []).append(function)

    def _follow(self, function: types.FunctionType) -> None:
        """Describe the globals that a function names, and what these are made of."""
        space, code = function.__globals__, function.__code__
        module = str(space.get("__name__"))
        is_library = _is_library(module, code.co_filename)
        if is_library:
            is_of_models = module.startswith(FOLLOWED_IN_TORCH)
            if _top(module) in STANDARD and not is_of_models:
                return
            if module.startswith(COMPUTES_NOTHING):
                return
        names = {name for inner in _codes_in(code) for name in inner.co_names}
        if not is_library:
            names.update(_words_of(code))
            if found := sorted(names & LOOKS_UP):
                name = f"{module}.{function.__qualname__}"
                self._keep_here(function, f"{name} uses {found[0]}()")
        for name in sorted(names):
            self._name(name)
            if name in space:
                self._bind(space, name, names, is_library)
            elif name in vars(builtins):
                self._watch.name(space, name)  # a global would hide it
                self._bind(vars(builtins), name, names, is_library=True)
        if not is_library:
            self._imports(function, names)

    def _imports(self, function: types.FunctionType, names: set[str]) -> None:
        """Describe the Python modules that a function imports, as far as it names them."""
        package = str(function.__globals__.get("__package__") or "")
        parents = itertools.accumulate(package.split("."), "{}.{}".format)
        packages = [*parents] if package else []  # imports may be relative
        for name in sorted(_imports_of(function.__code__)):
            found = {name, *itertools.accumulate(name.split("."), "{}.{}".format)}
            found.update(f"{parent}.{name}".rstrip(".") for parent in packages)
            for full in sorted(found):
                self._watch.name(sys.modules, full)
                if isinstance(module := sys.modules.get(full), types.ModuleType):
                    self._python_module(module, names, is_library=False)

    def _bind(
        self,
        space: dict[str, Any],
        name: str,
        names: set[str],
        is_library: bool,
        seen: tuple[types.ModuleType, ...] = (),
    ) -> None:
        """Describe a name of a Python module; of a module in it, those attributes that are named.

        seen: the modules that it was reached through.
        """
        value = space[name]
        if (id(space), name) not in self._bound:
            self._bound.add((id(space), name))
            self._watch.name(space, name)
            if not isinstance(value, types.ModuleType):
                path = f"{space.get('__name__')}.{name}"
                self._tell(path, self._value(path, value, is_library))
        if isinstance(value, types.ModuleType) and value not in seen:
            self._python_module(value, names, is_library, (*seen, value))

    def _python_module(
        self,
        module: types.ModuleType,
        names: set[str],
        is_library: bool,
        seen: tuple[types.ModuleType, ...] = (),
    ) -> None:
        # A function __getattr__ of a module answers for names that it does not have.
        for name in sorted({"__getattr__", *names} & vars(module).keys()):
            self._bind(vars(module), name, names, is_library, seen)

    def _name(self, name: str) -> None:
        """Note that code names something: functions of libraries that are called so are read."""
        if name in self._named:
            return
        self._named.add(name)
        for function in self._unnamed.pop(name, ()):
            self._follow(function)

    def _code(self, code: types.CodeType) -> str:
        if (known := self._codes.get(id(code))) is None:
            known = self._codes[id(code)] = code_digest(code)
        return known


def _registered_at(operator: str, device: str) -> bytes:
    """Return the file and the line that an implementation comes from; b"" if it is not known."""
    dump: str = torch._C._dispatch_dump(f"aten::{operator}")
    found = re.search(f"^{re.escape(device)}: registered at (.*?) ::", dump, re.MULTILINE)
    return found[1].encode(errors="surrogatepass") if found else b""


def code_digest(code: types.CodeType) -> str:
    """Return the digest of what a code object does; equal in every process.

    Names of files and numbers of lines are not part of it.
    """
    hasher = blake3()

    def add(part: object) -> None:
        held = part if isinstance(part, bytes) else repr(part).encode(errors="surrogatepass")
        hasher.update(len(held).to_bytes(8, "little") + held)

    def constant(value: object) -> object:
        if isinstance(value, types.CodeType):
            return code_digest(value)
        if isinstance(value, tuple):
            return tuple(map(constant, value))
        if isinstance(value, frozenset):  # in an order of each process
            return sorted(repr(constant(item)) for item in value)
        return value

    add(code.co_code)
    add(getattr(code, "co_exceptiontable", b""))
    add((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags))
    add((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
    add(tuple(map(constant, code.co_consts)))
    return hasher.hexdigest(length=16)


def has_hooks(hooks: Iterable[object]) -> bool:
    """Whether a hook looks at, or changes, what a module computes of every token."""
    return any(not getattr(hook, "__module__", "").startswith(KNOWN_HOOKS) for hook in hooks)


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object, and those inside it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _codes_in(part)


def _words_of(code: types.CodeType) -> Iterator[str]:
    """Yield the constants in a code object that can be names, as those of ``getattr``."""
    for inner in _codes_in(code):
        for item in inner.co_consts:
            if isinstance(item, str) and item.isidentifier():
                yield item


def _imports_of(code: types.CodeType) -> set[str]:
    """Return the names of all modules that a code object, or one inside it, imports."""
    steps = itertools.chain.from_iterable(map(dis.get_instructions, _codes_in(code)))
    return {step.argval for step in steps if step.opname == "IMPORT_NAME"}


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_standard(module: str) -> bool:
    """Whether a Python module is one of those at which the walk ends."""
    return _top(module) in STANDARD and _is_library(module)


def _is_library(module: str, file: str = "") -> bool:
    """Whether code is of transformers, torch, the standard library, or of an installed package."""
    if not file:
        file = str(getattr(sys.modules.get(module), "__file__", None) or "")
    if _top(module) == "transformers" or "site-packages" in file or "dist-packages" in file:
        return True
    if _top(module) in sys.stdlib_module_names:
        # A file of the user may have the name of a standard one.
        return not file or file.startswith((STANDARD_FOLDER, "<"))
    return _top(module) in STANDARD


def _is_of_python(kind: type) -> bool:
    """Whether a class was made by a ``class`` statement, so that it keeps no state elsewhere."""
    own = vars(kind)
    return "__weakref__" in own or "__slots__" in own or any(map(_is_of_python, kind.__bases__))


def _parts(value: Any) -> tuple[Any, ...] | None:
    """Return what a descriptor or a wrapper of functions consists of, if it is one."""
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, functools._lru_cache_wrapper):
        return (value.__wrapped__,)
    return None


def _reader(value: Any) -> Callable[[], tuple[Any, ...]]:
    """Return a function that reads what a reference refers to now."""
    if isinstance(value, weakref.ref):
        return lambda: (value(),)
    if isinstance(value, contextvars.ContextVar):
        return lambda: (value.get(None),)

    def read() -> tuple[Any, ...]:
        try:
            return (value.cell_contents,)
        except ValueError:
            return (None,)

    return read


def _slot(value: object, slot: types.MemberDescriptorType) -> object:
    try:
        return slot.__get__(value)
    except AttributeError:
        return MISSING


def _sort_key(item: object) -> str:
    if type(item) in PLAIN or isinstance(item, str | int | float | tuple | Enum):
        return repr(item)
    return str(getattr(item, "__qualname__", ""))


def _idle_adapters(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of the adapters that a LoRA layer of PEFT has and does not use.

    So KV is found again after other adapters were loaded. What a layer has of an adapter is in
    dictionaries, by its name.
    """
    lora = sys.modules.get("peft.tuners.lora.layer")
    if lora is None or not isinstance(module, lora.LoraLayer):
        return frozenset()
    variants = getattr(module, "lora_variant", None)
    if variants is None or any(variants.values()):  # one may use all
        return frozenset()
    used = {*module.merged_adapters}
    if not module.disable_adapters:
        used.update(module.active_adapters)
    return frozenset(module.r) - used
