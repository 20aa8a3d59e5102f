"""Everything that ``forward`` can reach is in a model's identity: code, settings and state."""

from __future__ import annotations

import contextvars
import copy
import functools
import os
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3

from kvtier.connectors.transformers.cache_layers import cache_argument
from kvtier.connectors.transformers.reach import TORCHS_OWN
from tests.connectors.transformers import models
from tests.connectors.transformers.models import answer, are_equal, small_model
from tests.connectors.transformers.test_attach import attached, on_grid_of_a_copy
from tests.connectors.transformers.test_weights import IDS, NAME, WHOLE, reused

pytestmark = pytest.mark.engine

FACTOR = 1.0
"""A global that a forward reads."""
VARIABLE = contextvars.ContextVar("factor", default=1.0)
HELPER = types.ModuleType("helper")
HELPER.scale = lambda hidden: hidden * 1.0  # type: ignore[attr-defined]
HELPER.factor = 1.0  # type: ignore[attr-defined]
LAZY = types.ModuleType("lazy")
exec("STATE = {'factor': 1.0}\ndef __getattr__(name): return STATE[name]", vars(LAZY))


class Steered(torch.nn.Module):
    """A layer whose result is multiplied by what a function reads from any object."""

    level = 1.0

    def __init__(self, inner: torch.nn.Module, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner = inner
        self.held = held
        self.read = read

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.inner(hidden) * self.read(self.held)


class OtherSteered(Steered):
    """The same layer with another forward."""

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.inner(hidden) * 0.5


class Plain:
    """An object without anything but an attribute."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


@dataclass
class Data:
    factor: float = 1.0


class Meta(type):
    level = 1.0


class OfMeta(metaclass=Meta):
    """A class whose attributes are those of its own class, too."""


class Choice(Enum):
    ONE = 1


class Masked(bytearray):
    """Bytes with an attribute."""

    factor = 1.0


class AttributeDict(dict[str, Any]):
    """A dictionary whose items are attributes; a missing one is a KeyError."""

    __getattr__ = dict.__getitem__

    def __deepcopy__(self, memo: object) -> AttributeDict:
        return AttributeDict(self)


class Tree:
    """An object that reaches itself."""

    def __init__(self) -> None:
        self.parent = self
        self.leaf = Plain(1.0)


def steer(model: Any, held: Any, read: Callable[[Any], Any]) -> Steered:
    """Put a steered layer into a model."""
    layer = model.model.layers[1]
    layer.mlp = Steered(layer.mlp, held, read)
    return layer.mlp


class Scaling(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), named: Any = None
    ) -> Any:
        found = function(*args, **(named or {}))
        return found * 0.5 if function is functional.silu else found


class ScalingBelow(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, kinds: Any, args: Any = (), named: Any = None
    ) -> Any:
        found = function(*args, **(named or {}))
        return found * 0.5 if function is torch.ops.aten.silu.default else found


Steps = Callable[[Any, pytest.MonkeyPatch, ExitStack], Iterator[None]]
"""Prepares a model, yields, and changes what its forward reaches."""


def after(change: Callable[[Any, pytest.MonkeyPatch, ExitStack], object]) -> Steps:
    """Return a change of a model that needs no preparation."""

    def steps(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Iterator[None]:
        yield
        change(model, patch, stack)

    return steps


def steered(
    held: Callable[[], Any],
    read: Callable[[Any], Any],
    change: Callable[[Any, pytest.MonkeyPatch], object],
) -> Steps:
    """Return a change of what steers a layer.

    Args:
        held: makes the object that the layer holds.
        read: reads a factor from it.
        change: changes it; it gets the layer.
    """

    def steps(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Iterator[None]:
        layer = steer(model, held(), read)
        yield
        change(layer, patch)

    return steps


def attribute_of(held: Callable[[], Any], attribute: str = "factor") -> Steps:
    """Return a change of an attribute of an object that steers a layer."""
    return steered(
        held,
        lambda held: getattr(held, attribute),
        lambda layer, patch: setattr(layer.held, attribute, 0.5),
    )


def nothing() -> None:
    """Steer a layer without an object."""


def halved(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that halves the first argument of another one."""

    @functools.wraps(inner)
    def other(first: Any, *args: Any, **named: Any) -> Any:
        return inner(first * 0.5, *args, **named)

    return other


def halved_query(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function that halves the queries."""
    return lambda module, query, *args, **named: inner(module, query * 0.5, *args, **named)


def is_mlp(module: Any) -> bool:
    return isinstance(module, modeling_qwen3.Qwen3MLP)


def hook_after(module: Any, args: Any, found: Any) -> Any:
    return found * 0.5 if is_mlp(module) else None


def hook_before(module: Any, args: Any) -> Any:
    return (args[0] * 0.5,) if is_mlp(module) else None


def closure(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Iterator[None]:
    factor = 1.0
    mlp = model.model.layers[1].mlp
    inner = mlp.forward
    mlp.forward = lambda x: inner(x) * factor
    yield
    factor = 0.5


def object_in_a_closure(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Iterator[None]:
    settings = {"factors": [1.0]}
    mlp = model.model.layers[1].mlp
    inner = type(mlp).forward
    patch.setattr(type(mlp), "forward", lambda self, x: inner(self, x) * settings["factors"][0])
    yield
    settings["factors"][0] = 0.5


def class_in_a_package_named_as_a_standard_one(
    model: Any, patch: pytest.MonkeyPatch, stack: ExitStack
) -> Iterator[None]:
    module = types.ModuleType("code.model")
    module.__file__ = "/code/model.py"
    patch.setitem(sys.modules, "code.model", module)
    kind = type("Scale", (), {"level": 1.0, "__module__": "code.model"})
    steer(model, kind(), lambda held: held.level)
    yield
    kind.level = 0.5  # type: ignore[attr-defined]


def attribute_of_a_choice(
    model: Any, patch: pytest.MonkeyPatch, stack: ExitStack
) -> Iterator[None]:
    patch.setattr(Choice.ONE, "factor", 1.0, raising=False)
    steer(model, Choice.ONE, lambda held: held.factor)
    yield
    patch.setattr(Choice.ONE, "factor", 0.5)


def default_of_a_function(
    model: Any, patch: pytest.MonkeyPatch, stack: ExitStack
) -> Iterator[None]:
    def read(_: Any, factor: float = 1.0) -> float:
        return factor

    steer(model, None, read)
    yield
    read.__defaults__ = (0.5,)


def attribute_of_a_function(
    model: Any, patch: pytest.MonkeyPatch, stack: ExitStack
) -> Iterator[None]:
    def read(_: Any) -> Any:
        return read.factor  # type: ignore[attr-defined]

    read.factor = 1.0  # type: ignore[attr-defined]
    steer(model, None, read)
    yield
    read.factor = 0.5  # type: ignore[attr-defined]


def helper_imported_in_a_function(
    model: Any, patch: pytest.MonkeyPatch, stack: ExitStack
) -> Iterator[None]:
    def read(held: Any) -> Any:
        import steering_helper  # type: ignore[import-not-found]

        return steering_helper.scale(held)

    patch.setitem(sys.modules, "steering_helper", HELPER)
    steer(model, torch.ones(1), read)
    yield
    patch.setattr(HELPER, "scale", lambda hidden: hidden * 0.5)


def another_base(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Iterator[None]:
    class Late(Steered):
        pass

    layer = steer(model, None, lambda _: 1.0)
    layer.__class__ = Late
    yield
    Late.__bases__ = (OtherSteered,)


def silu(stack: ExitStack, factor: float, file: str = __file__) -> None:
    """Replace the operator on the CPU, as code in ``file`` would."""
    code = 'library = torch.library.Library("aten", "IMPL")\nlibrary.impl("silu", silu, "CPU")'
    names = {"torch": torch, "silu": lambda hidden: hidden * torch.sigmoid(hidden) * factor}
    with warnings.catch_warnings(action="ignore"):  # torch's, of any replaced operator
        exec(compile(code, file, "exec"), names)
    stack.callback(names["library"]._destroy)  # type: ignore[attr-defined]


def operator_that_torch_replaces_too(
    model: Any, patch: pytest.MonkeyPatch, stack: ExitStack
) -> Iterator[None]:
    silu(stack, 1.0, f"{TORCHS_OWN.decode()}of_a_test.py")
    yield
    silu(stack, 0.5)


def attribute_of_a_weight(
    model: Any, patch: pytest.MonkeyPatch, stack: ExitStack
) -> Iterator[None]:
    weight = model.get_parameter(NAME)
    weight.factor = 1.0
    steer(model, None, lambda _: weight.factor)  # copies of a weight have no attributes
    yield
    weight.factor = 0.5


def weak_reference(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Iterator[None]:
    target = Plain(1.0)
    stack.callback(lambda: target)
    steer(model, weakref.ref(target), lambda held: held().factor)
    yield
    target.factor = 0.5


def context_variable(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Iterator[None]:
    steer(model, None, lambda _: VARIABLE.get())
    token = VARIABLE.set(1.0)
    stack.callback(lambda: VARIABLE.reset(token))
    yield
    VARIABLE.set(0.5)


def row_of_a_buffer_of_numpy(
    model: Any, patch: pytest.MonkeyPatch, stack: ExitStack
) -> Iterator[None]:
    shared = np.ones(64, np.float32)
    layer = steer(model, None, lambda _: 1.0)
    layer.register_buffer("factors", torch.from_numpy(shared))
    layer.read = lambda _: layer.factors
    yield
    shared[9] = 0.5


def scaled_code(_: Any, patch: pytest.MonkeyPatch, __: ExitStack) -> None:
    other = compile("def f(x): return x * 0.5", "f", "exec").co_consts[0]
    patch.setattr(modeling_qwen3.rotate_half, "__code__", other)


def scaled_forward(_: Any, patch: pytest.MonkeyPatch, __: ExitStack) -> None:
    inner = modeling_qwen3.Qwen3MLP.forward
    patch.setattr(modeling_qwen3.Qwen3MLP, "forward", lambda self, x: 0.5 * inner(self, x))


def doubled_power(_: Any, patch: pytest.MonkeyPatch, __: ExitStack) -> None:
    inner = torch.Tensor.pow
    patch.setattr(torch.Tensor, "pow", lambda self, n: inner(self, n) * 2, raising=False)


def negated(model: Any, *_: Any) -> None:
    weight = model.get_parameter(NAME)
    weight.data = torch._neg_view(weight.data)


def scaled_row(rows: Any, at: int = 37) -> None:
    rows[at] *= 1.5


def masked_array() -> Any:
    return np.ma.masked_array([1.0, 0.5], mask=[False, False])


PASSED: dict[str, Steps] = {
    "global hook": after(
        lambda model, _, stack: stack.callback(
            modules.register_module_forward_hook(hook_after).remove
        )
    ),
    "operator": after(lambda _, __, stack: silu(stack, 0.5)),
    "operator that torch replaces too": operator_that_torch_replaces_too,
    "global hook before": after(
        lambda model, _, stack: stack.callback(
            modules.register_module_forward_pre_hook(hook_before).remove
        )
    ),
    "hook of a layer": after(
        lambda model, _, stack: stack.callback(
            model.model.layers[1].mlp.register_forward_hook(hook_after).remove
        )
    ),
    "function mode": after(lambda model, _, stack: stack.enter_context(Scaling())),
    "dispatch mode": after(lambda model, _, stack: stack.enter_context(ScalingBelow())),
    "negated view": after(negated),
}
"""Changes that pass calls through: these answer as they do without chunks."""
CHANGES: dict[str, Steps] = {
    **PASSED,
    "forward of a class": after(scaled_forward),
    "forward of a base": after(
        lambda _, patch, __: patch.setattr(
            torch.nn.Linear, "forward", lambda self, x: functional.linear(x, self.weight / 2)
        )
    ),
    "code of a function": after(scaled_code),
    "function of a module": after(
        lambda _, patch, __: patch.setattr(
            modeling_qwen3, "apply_rotary_pos_emb", halved(modeling_qwen3.apply_rotary_pos_emb)
        )
    ),
    "function of torch": after(
        lambda _, patch, __: patch.setattr(
            functional,
            "scaled_dot_product_attention",
            halved(functional.scaled_dot_product_attention),
        )
    ),
    "activation of torch": after(
        lambda _, patch, __: patch.setattr(functional, "silu", functional.gelu)
    ),
    "method of tensors": after(doubled_power),
    "registered attention": after(
        lambda _, patch, __: patch.setitem(
            type(ALL_ATTENTION_FUNCTIONS)._global_mapping,
            "sdpa",
            halved_query(ALL_ATTENTION_FUNCTIONS["sdpa"]),
        )
    ),
    "local attention": after(
        lambda _, patch, __: patch.setitem(
            ALL_ATTENTION_FUNCTIONS._local_mapping,
            "sdpa",
            halved_query(ALL_ATTENTION_FUNCTIONS["sdpa"]),
        )
    ),
    "another module": after(
        lambda model, _, __: setattr(model.model.layers[1].mlp, "act_fn", ACT2FN["gelu"])
    ),
    "closure": closure,
    "object in a closure": object_in_a_closure,
    "global name": steered(
        nothing, lambda _: FACTOR, lambda _, patch: patch.setitem(globals(), "FACTOR", 0.5)
    ),
    "global by its name": steered(
        nothing,
        lambda _: globals()["FACTOR"],
        lambda _, patch: patch.setitem(globals(), "FACTOR", 0.5),
    ),
    "attribute by its name": steered(
        nothing,
        lambda _: getattr(HELPER, "factor"),  # noqa: B009 - this is the case
        lambda _, patch: patch.setattr(HELPER, "factor", 0.5),
    ),
    "attribute made by a module": steered(
        nothing, lambda _: LAZY.factor, lambda _, patch: patch.setitem(LAZY.STATE, "factor", 0.5)
    ),
    "class of a class": steered(
        nothing, lambda _: OfMeta.level, lambda _, patch: patch.setattr(Meta, "level", 0.5)
    ),
    "class in a package named as a standard one": class_in_a_package_named_as_a_standard_one,
    "attribute of a choice": attribute_of_a_choice,
    "attribute of bytes": attribute_of(lambda: Masked(b"1")),
    "mask of an array": steered(
        masked_array,
        lambda held: float(held.mean()),
        lambda layer, _: layer.held.__setitem__(0, np.ma.masked),
    ),
    "factory of a dictionary": steered(
        lambda: defaultdict(lambda: 1.0),
        lambda held: (held["factor"], held.clear())[0],
        lambda layer, _: setattr(layer.held, "default_factory", lambda: 0.5),
    ),
    "item of an attribute dictionary": steered(
        lambda: AttributeDict(factor=1.0),
        lambda held: held["factor"],
        lambda layer, _: layer.held.update(factor=0.5),
    ),
    "hidden builtin": steered(
        lambda: -1.0,
        lambda held: abs(held) + 0,
        lambda _, patch: patch.setitem(globals(), "abs", lambda number: number),
    ),
    "class attribute": steered(
        nothing, lambda _: Steered.level, lambda _, patch: patch.setattr(Steered, "level", 0.5)
    ),
    "default of a function": default_of_a_function,
    "attribute of a function": attribute_of_a_function,
    "function of a helper": steered(
        lambda: torch.ones(1),
        lambda held: HELPER.scale(held) + 0,
        lambda _, patch: patch.setattr(HELPER, "scale", lambda hidden: hidden * 0.5),
    ),
    "helper imported in a function": helper_imported_in_a_function,
    "another class": steered(
        nothing, lambda _: 1.0, lambda layer, _: setattr(layer, "__class__", OtherSteered)
    ),
    "another base": another_base,
    "partial": steered(
        nothing,
        functools.partial(lambda factor, _: factor, 1.0),
        lambda layer, _: setattr(layer, "read", functools.partial(layer.read.func, 0.5)),
    ),
    "object in containers": steered(
        lambda: {"a": [(Plain(1.0),)]},
        lambda held: held["a"][0][0].factor,
        lambda layer, _: setattr(layer.held["a"][0][0], "factor", 0.5),
    ),
    "object in a circle": steered(
        Tree,
        lambda held: held.parent.leaf.factor,
        lambda layer, _: setattr(layer.held.leaf, "factor", 0.5),
    ),
    "items of a set": steered(
        lambda: {1.0}, lambda held: max(held) + 0, lambda layer, _: layer.held.add(2.0)
    ),
    "array of numpy": steered(
        lambda: np.ones(10_000),
        lambda held: float(held[7]),
        lambda layer, _: layer.held.__setitem__(7, 0.5),
    ),
    "array of bytes": steered(
        lambda: bytearray(b"\2" * 9),
        lambda held: held[3] / 2,
        lambda layer, _: layer.held.__setitem__(3, 1),
    ),
    "tensor in an object": steered(
        lambda: Plain(torch.ones(64)),  # type: ignore[arg-type]
        lambda held: held.factor,
        lambda layer, _: layer.held.factor.__setitem__(5, 0.5),
    ),
    "attribute of a weight": attribute_of_a_weight,
    "weak reference": weak_reference,
    "context variable": context_variable,
    "rows by numpy": after(
        lambda model, _, __: scaled_row(model.get_parameter(NAME).detach().numpy())
    ),
    "rows by data": after(
        lambda model, _, __: scaled_row(model.get_input_embeddings().weight.data, int(IDS[0, 5]))
    ),
    "rows by dlpack": after(
        lambda model, _, __: scaled_row(
            torch.utils.dlpack.from_dlpack(model.get_parameter(NAME).detach())
        )
    ),
    "row of a buffer of numpy": row_of_a_buffer_of_numpy,
    "plain object": attribute_of(lambda: Plain(1.0)),
    "slots": attribute_of(lambda: Slotted(1.0)),
    "dataclass": attribute_of(lambda: Data(1.0)),
    "SimpleNamespace": attribute_of(lambda: types.SimpleNamespace(factor=1.0)),
}


@pytest.mark.parametrize("is_inference", [False, True], ids=["plain", "inference"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_any_kind_finds_nothing(
    change: str, is_inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        if is_inference:  # its tensors have no versions
            stack.enter_context(torch.inference_mode())
        model = small_model()
        steps = CHANGES[change](model, monkeypatch, stack)
        next(steps)
        with attached(model):
            before = on_grid_of_a_copy(model, IDS)
            assert (reused(model), reused(model)) == (0, WHOLE)  # unchanged, it is found
            next(steps, None)
            expected = on_grid_of_a_copy(model, IDS)
            assert not are_equal(before, expected), "the change has no effect"
            if change in PASSED:
                expected = answer(copy.deepcopy(model), IDS)
            assert are_equal(answer(model, IDS), expected)
            assert model.kvtier.stats().num_reused_tokens == WHOLE


@pytest.mark.parametrize(
    "held", [lambda: (part for part in [1.0]), threading.local], ids=["generator", "local"]
)
def test_an_object_of_an_unknown_kind_is_passed_through(held: Callable[[], Any]) -> None:
    model = small_model()
    steer(model, None, lambda _: 1.0).held = held()
    alone = answer(model, IDS)
    with attached(model) as cache:
        for _ in range(2):
            assert are_equal(answer(model, IDS), alone)
        [(reason, num)] = cache.stats().passed.items()
        assert "model.layers.1.mlp.held is a" in reason
        assert num == 2


RESTART = """
import sys, torch, types, numpy, dataclasses
from pathlib import Path
from transformers.models.qwen3 import modeling_qwen3
from tests.connectors.transformers.models import CHUNK, answer, are_equal, on_grid, prompt
from tests.connectors.transformers.models import small_model
import kvtier, steering, steering_helper
torch.set_num_threads(1)
folder, factor = Path(sys.argv[1]), float(sys.argv[2])

@dataclasses.dataclass
class Data:
    factor: float

def helper(model): steering.steer(model, None, steering_helper.scale)
def namespace(model): steering.steer(model, types.SimpleNamespace(factor=factor), steering.factor)
def data(model): steering.steer(model, Data(factor), steering.factor)
def array(model): steering.steer(model, numpy.full(9, factor), lambda held: float(held[3]))
def closure(model): steering.steer(model, None, lambda held: factor)
def patched(model):
    inner = modeling_qwen3.Qwen3MLP.forward
    modeling_qwen3.Qwen3MLP.forward = lambda self, x: inner(self, x) * factor

for change in (helper, namespace, data, array, closure, patched):
    model, ids = small_model(), prompt(0)
    change(model)
    expected = on_grid(model, ids)
    disk = {"disk_path": str(folder / change.__name__), "disk_capacity": "8MiB"}
    with kvtier.attach(model, host_capacity="1MiB", chunk_tokens=CHUNK, **disk) as cache:
        assert are_equal(answer(model, ids), expected)
        print(change.__name__, cache.stats().num_reused_tokens, cache.stats().weights)
"""
STEERING = """
import torch
class Steered(torch.nn.Module):
    def __init__(self, inner, held, read):
        super().__init__()
        self.inner, self.held, self.read = inner, held, read
    def forward(self, hidden):
        return self.inner(hidden) * self.read(self.held)
def steer(model, held, read):
    model.model.layers[1].mlp = Steered(model.model.layers[1].mlp, held, read)
def factor(held):
    return held.factor
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_new_process_finds_kv_on_disk_only_if_code_and_state_are_equal(tmp_path: Path) -> None:
    (tmp_path / "steering.py").write_text(STEERING)

    def run(factor: float) -> dict[str, int]:
        (tmp_path / "steering_helper.py").write_text(f"def scale(_): return {factor}\n")
        command = [sys.executable, "-B", "-c", RESTART, str(tmp_path), str(factor)]
        root = Path(models.__file__).parents[3]
        done = subprocess.run(
            command,
            cwd=root,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines = [line.split() for line in done.stdout.splitlines()]
        assert {line[2] for line in lines} == {"read"}
        return {line[0]: int(line[1]) for line in lines}

    kinds = ("helper", "namespace", "data", "array", "closure", "patched")
    assert run(0.5) == dict.fromkeys(kinds, 0)
    assert run(0.5) == dict.fromkeys(kinds, WHOLE)
    assert run(0.75) == dict.fromkeys(kinds, 0)


@pytest.mark.parametrize(
    "setting", ["output_hidden_states", "output_attentions", "output_router_logits"]
)
def test_outputs_that_a_configuration_asks_for_are_passed_through(setting: str) -> None:
    kind = "qwen3_moe" if setting == "output_router_logits" else "qwen3"
    model = models.other_model(kind, attn_implementation="eager")
    model.set_attn_implementation("eager")
    part = setting.removeprefix("output_")
    with attached(model) as cache, torch.no_grad():
        answer(model, IDS)
        setattr(model.config, setting, True)
        held = {cache_argument(type(model).forward): DynamicCache(config=model.config)}
        found = model(IDS, logits_to_keep=1, **held)
        assert all(IDS.shape[1] in tensor.shape or len(tensor) >= 100 for tensor in found[part])
        assert dict(cache.stats().passed) == {f"config.{setting} is set": 1}
        setattr(model.config, setting, False)
        assert reused(model) == WHOLE
