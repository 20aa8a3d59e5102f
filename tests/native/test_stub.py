"""Signatures: the stub, the native core and the Python twins must agree."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from kvtier.core import hot
from kvtier.core.reference import crc, planes, quantize
from kvtier.core.reference.copy import copy_batch as reference_copy_batch
from kvtier.core.reference.copy import copy_checked as reference_copy_checked
from kvtier.core.reference.free_slots import FreeSlots, free_rows
from kvtier.core.reference.key_table import KeyTable
from kvtier.core.reference.receive import receive_values as reference_receive_values
from kvtier.core.reference.slot_table import SlotTable
from kvtier.core.reference.tokens import pack_tokens as reference_pack_tokens

STUB = Path(hot.__file__).parents[1] / "_native.pyi"
TWINS = {
    "copy_batch": reference_copy_batch,
    "copy_checked": reference_copy_checked,
    "crc32c": crc.crc32c,
    "crc32c_table": crc.crc32c,
    "crc32c_many": crc.crc32c_many,
    "crc32c_rows": crc.crc32c_rows,
    "choose_planes": planes.choose_planes,
    "free_rows": free_rows,
    "join_planes": planes.join_planes,
    "pack_tokens": reference_pack_tokens,
    "quantize_channels": quantize.quantize_channels,
    "receive_values": reference_receive_values,
    "restore_channels": quantize.restore_channels,
    "split_planes": planes.split_planes,
}


def signature(definition: ast.FunctionDef) -> dict[str, object]:
    """Argument names in order, each with its default; ``...`` for none."""
    arguments = definition.args
    assert not arguments.posonlyargs
    assert not arguments.kwonlyargs
    defaults = [ast.literal_eval(default) for default in arguments.defaults]
    missing: list[object] = [...] * (len(arguments.args) - len(defaults))
    names = [argument.arg for argument in arguments.args]
    return dict(zip(names, missing + defaults, strict=True))


def stubs() -> dict[str, dict[str, object]]:
    """Every function that the stub declares."""
    body = ast.parse(STUB.read_text(encoding="utf-8")).body
    return {item.name: signature(item) for item in body if isinstance(item, ast.FunctionDef)}


def methods() -> dict[str, dict[str, object]]:
    """Return the methods of every class in the stub, without special and decorated ones."""
    body = ast.parse(STUB.read_text(encoding="utf-8")).body
    return {
        f"{kind.name}.{item.name}": signature(item)
        for kind in body
        if isinstance(kind, ast.ClassDef)
        for item in kind.body
        if isinstance(item, ast.FunctionDef)
        and not item.name.startswith("__")
        and not item.decorator_list
    }


def test_every_method_of_the_stub_agrees_with_the_native_core() -> None:
    native = pytest.importorskip("kvtier._native", reason="the native core is not built")
    built = {}
    for kind in (
        native.BlockTrie,
        native.FreeSlots,
        native.KeyIndex,
        native.KeyTable,
        native.Keys,
        native.Numbers,
        native.LivePolicy,
        native.PolicyReplay,
        native.SlotLeases,
        native.SlotTable,
        native.UringRing,
    ):
        for name, method in vars(kind).items():
            if type(method).__name__ == "nb_method" and not name.startswith("__"):
                [(text, *_)] = method.__nb_signature__
                [definition] = ast.parse(text + ": ...").body
                assert isinstance(definition, ast.FunctionDef)
                built[f"{kind.__name__}.{name}"] = signature(definition)
    assert methods() == built


def signature_of(function: Any) -> dict[str, object]:
    """``signature`` of a function in Python."""
    return {
        argument.name: ... if argument.default is argument.empty else argument.default
        for argument in inspect.signature(function).parameters.values()
    }


def test_every_stub_has_a_twin_with_its_signature() -> None:
    assert stubs() == {name: signature_of(twin) for name, twin in TWINS.items()}


@pytest.mark.parametrize("twin", [FreeSlots, KeyTable, SlotTable])
def test_twin_of_a_class_has_its_methods(twin: type) -> None:
    prefix = f"{twin.__name__}."
    twins = {
        prefix + name: signature_of(method)
        for name, method in vars(twin).items()
        if not name.startswith("_")
    }
    assert twins == {name: each for name, each in methods().items() if name.startswith(prefix)}


def test_every_stub_agrees_with_the_native_core() -> None:
    native = pytest.importorskip("kvtier._native", reason="the native core is not built")
    built = {}
    for name in dir(native):
        function = getattr(native, name)
        if type(function).__name__ == "nb_func":
            [(text, *_)] = function.__nb_signature__
            [definition] = ast.parse(text + ": ...").body
            assert isinstance(definition, ast.FunctionDef)
            built[name] = signature(definition)
    assert stubs() == built
