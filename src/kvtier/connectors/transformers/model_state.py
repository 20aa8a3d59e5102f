"""State of a loaded model: its tensors, and the settings of its modules.

Whatever decides on KV is here: parameters and buffers, tensors that are plain attributes, numbers
and names of modules and configurations, and functions in the place of methods. Adapters are
switched, scaled and merged by these settings.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator, Sequence
from enum import Enum

import torch
from blake3 import blake3
from transformers import PreTrainedModel

NUM_SAMPLES = 32
"""Elements of each tensor that are compared at each prompt."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers of the size of an element; larger elements are several."""
OWN_CODE = ("torch.", "transformers.", "accelerate.", "builtins.")
"""Packages whose functions are known by their names."""
UNTOLD = {
    "_name_or_path",
    "_is_hf_initialized",
    "_original_object_hash",
    "generation_config",
    "transformers_version",
    "use_cache",
}
"""Settings that change no KV, some of which differ in each process."""
INTERNAL = vars(torch.nn.Module()).keys() - {"training"} | UNTOLD
"""Attributes of every module: its tensors, its modules and its hooks."""
PLAIN = {bool, int, float, str, types.NoneType, torch.dtype, torch.Size, torch.device}


class ModelState:
    """State of a model at one time. Few elements of its tensors are read.

    Attributes:
        settings: digest of all settings; equal in every process.
        tensors: all tensors by name.
        marks: digest of each tensor's place, version, shape, type and samples, by name.
        stamp: digest of it all; it differs after changes.
        unreadable: why the settings don't say everything, or "".
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.unreadable = ""
        self._told: list[str] = []
        self._here: list[int] = []  # ids, which say nothing to another process
        self._configs: dict[int, str] = {}
        self._add_module("", model)
        self.settings = blake3("\n".join(self._told).encode()).digest()
        self.marks = _marks(self.tensors)
        hasher = blake3(self.settings + repr(self._here).encode())
        for name, mark in self.marks.items():
            hasher.update(name.encode() + mark)
        self.stamp = hasher.digest()

    def _add_module(
        self, name: str, module: torch.nn.Module, but: frozenset[str] = frozenset()
    ) -> None:
        """Add a module and those in it, without what has one of the names ``but``.

        name: that of the module, with a dot at its end.
        """
        self._told.append(f"{name} {type(module).__qualname__}")
        idle = _idle_adapters(module)
        for attribute, value in vars(module).items():
            if attribute in INTERNAL:
                continue
            if (idle or but) and isinstance(value, dict):
                value = {key: each for key, each in value.items() if key not in idle | but}
            self._add(name + attribute, value)
        for group in (module._parameters, module._buffers):
            for own, tensor in group.items():
                if tensor is not None and own not in but:
                    self.tensors[name + own] = tensor
        for own, inner in module._modules.items():
            if inner is not None and own not in but:
                is_by_adapter = hasattr(inner, "keys")
                self._add_module(f"{name}{own}.", inner, idle if is_by_adapter else frozenset())

    def _add(self, name: str, value: object) -> None:
        """Add the value of an attribute, as far as it may decide on KV."""
        if (settings := self._configs.get(id(value))) is not None:  # most modules have the model's
            self._told.append(f"{name}={{{settings}}}")
        elif _is_plain(value):
            self._told.append(f"{name}={value!r}")
        elif isinstance(value, torch.Tensor):
            self.tensors[name] = value
        elif isinstance(value, dict | list | tuple):
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                self._add(f"{name}[{key!r}]", each)
        elif hasattr(value, "to_diff_dict"):
            self._configs[id(value)] = settings = _settings(value)
            self._told.append(f"{name}={{{settings}}}")
        elif isinstance(value, torch.ScriptObject):
            self._here.append(id(value))
            self.unreadable = f"{name} is packed"
        elif (function := _function(value)) is not None:
            self._here.append(id(function))
            self._told.append(f"{name}={function.__module__}.{function.__qualname__}")
            if not f"{function.__module__}.".startswith(OWN_CODE):
                self.unreadable = f"{name} is a function of its own"


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


def is_composed(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of others: quantised by torchao, for instance."""
    return hasattr(tensor, "__tensor_flatten__")


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor consists of."""
    if not is_composed(tensor):
        yield tensor.detach()
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from parts(getattr(tensor, name))


def meaning(tensor: torch.Tensor) -> str:
    """Return everything about a tensor but its elements; equal in every process."""
    told = f"{type(tensor).__qualname__} {tuple(tensor.shape)} {tensor.dtype}"
    if is_composed(tensor):
        names, settings = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = [meaning(getattr(tensor, name)) for name in names]
        told += f" of {', '.join(inner)} with {settings!r}"
    return told


def _marks(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Return a digest of each tensor that differs after changes."""
    flat = [[*parts(tensor)] for tensor in tensors.values()]
    samples = iter(_samples([part for each in flat for part in each]))
    marks = {}
    for (name, tensor), each in zip(tensors.items(), flat, strict=True):
        told: list[object] = [id(tensor), tensor.shape, tensor.dtype]
        for part in each:
            version = 0 if part.is_inference() else part._version
            told += (version, next(samples))
            if part.layout is torch.strided:  # others have neither
                told += (part.data_ptr(), part.stride())
        marks[name] = blake3(repr(told).encode()).digest()
    return marks


def _samples(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return a few elements of each tensor. Assignments to ``tensor.data`` leave no other trace.

    The tensors of a device are read together, since reading waits for the device.
    """
    groups: dict[object, list[tuple[int, torch.Tensor]]] = {}
    for at, tensor in enumerate(tensors):
        if tensor.is_meta or not tensor.numel() or tensor.layout is not torch.strided:
            continue
        if tensor.is_quantized:
            tensor = tensor.int_repr()
        # From the first element to the last in memory, in whatever order.
        span = tensor.numel()
        if not tensor.is_contiguous():
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            span = 1 + sum((size - 1) * stride for size, stride in pairs)
        kind = INTEGERS.get(tensor.itemsize, torch.int32)
        step = max(1, span // NUM_SAMPLES)
        some = tensor.as_strided((span,), (1,))[::step][:NUM_SAMPLES]
        if kind.itemsize < tensor.itemsize:
            some = some.contiguous()
        groups.setdefault((tensor.device, kind), []).append((at, some.view(kind)))
    found = [b""] * len(tensors)
    for group in groups.values():
        values = torch.cat([some for _, some in group]).cpu().numpy()
        end = 0
        for at, some in group:
            begin, end = end, end + len(some)
            found[at] = values[begin:end].tobytes()
    return found


def _settings(owner: object) -> str:
    """Return the settings of a configuration, and of those in it."""
    told = []
    for name, value in vars(owner).items():
        if name in UNTOLD:
            continue
        if hasattr(value, "to_diff_dict"):
            told.append(f"{name}={{{_settings(value)}}}")
        elif _is_plain(value):
            told.append(f"{name}={value!r}")
    return ", ".join(sorted(told))


def _is_plain(value: object) -> bool:
    if type(value) in PLAIN or isinstance(value, Enum | str | int | float):
        return True
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    return isinstance(value, list | tuple) and all(map(_is_plain, value))


def _function(value: object) -> types.FunctionType | None:
    """Return the Python function that an attribute calls, if it is one."""
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None
