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


Change = Iterator[None]
# Every function below prepares a model, yields, and changes what its forward reaches.


def forward_of_a_class(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    inner = modeling_qwen3.Qwen3MLP.forward
    patch.setattr(modeling_qwen3.Qwen3MLP, "forward", lambda self, x: 0.5 * inner(self, x))


def forward_of_a_base(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    patch.setattr(torch.nn.Linear, "forward", lambda self, x: functional.linear(x, self.weight / 2))


def code_of_a_function(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    other = compile("def f(x): return x * 0.5", "f", "exec").co_consts[0]
    patch.setattr(modeling_qwen3.rotate_half, "__code__", other)


def function_of_a_module(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    inner = modeling_qwen3.apply_rotary_pos_emb

    @functools.wraps(inner)
    def other(q: Any, k: Any, *args: Any, **named: Any) -> Any:
        return inner(q * 0.5, k, *args, **named)

    patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", other)


def function_of_torch(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    inner = functional.scaled_dot_product_attention
    patch.setattr(
        functional, "scaled_dot_product_attention", lambda q, *a, **named: inner(q / 2, *a, **named)
    )


def activation_of_torch(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    patch.setattr(functional, "silu", functional.gelu)


def method_of_tensors(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    inner = torch.Tensor.pow
    patch.setattr(torch.Tensor, "pow", lambda self, n: inner(self, n) * 2, raising=False)


def registered_attention(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    inner = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def other(module: Any, query: Any, *args: Any, **named: Any) -> Any:
        return inner(module, query * 0.5, *args, **named)

    patch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, "sdpa", other)


def local_attention(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    inner = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def other(module: Any, query: Any, *args: Any, **named: Any) -> Any:
        return inner(module, query * 0.5, *args, **named)

    patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", other)


def another_module(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    model.model.layers[1].mlp.act_fn = ACT2FN["gelu"]


def global_hook(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield

    def hook(module: Any, args: Any, found: Any) -> Any:
        return found * 0.5 if isinstance(module, modeling_qwen3.Qwen3MLP) else None

    stack.callback(modules.register_module_forward_hook(hook).remove)


def global_hook_before(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield

    def hook(module: Any, args: Any) -> Any:
        return (args[0] * 0.5,) if isinstance(module, modeling_qwen3.Qwen3MLP) else None

    stack.callback(modules.register_module_forward_pre_hook(hook).remove)


def hook_of_a_layer(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    mlp = model.model.layers[1].mlp
    stack.callback(mlp.register_forward_hook(lambda module, args, found: found * 0.5).remove)


def function_mode(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    stack.enter_context(Scaling())


def dispatch_mode(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    stack.enter_context(ScalingBelow())


def closure(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    factor = 1.0
    mlp = model.model.layers[1].mlp
    inner = mlp.forward
    mlp.forward = lambda x: inner(x) * factor
    yield
    factor = 0.5


def object_in_a_closure(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    settings = {"factors": [1.0]}
    mlp = model.model.layers[1].mlp
    inner = type(mlp).forward
    patch.setattr(type(mlp), "forward", lambda self, x: inner(self, x) * settings["factors"][0])
    yield
    settings["factors"][0] = 0.5


def global_name(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    steer(model, None, lambda _: FACTOR)
    yield
    patch.setitem(globals(), "FACTOR", 0.5)


def global_by_its_name(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    steer(model, None, lambda _: globals()["FACTOR"])
    yield
    patch.setitem(globals(), "FACTOR", 0.5)


def attribute_by_its_name(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    steer(model, None, lambda _: getattr(HELPER, "factor"))  # noqa: B009 - this is the case
    yield
    patch.setattr(HELPER, "factor", 0.5)


def attribute_made_by_a_module(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    steer(model, None, lambda _: LAZY.factor)
    yield
    patch.setitem(LAZY.STATE, "factor", 0.5)


def class_of_a_class(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    steer(model, None, lambda _: OfMeta.level)
    yield
    patch.setattr(Meta, "level", 0.5)


def class_in_a_package_named_as_a_standard_one(
    model: Any, patch: pytest.MonkeyPatch, stack: ExitStack
) -> Change:
    module = types.ModuleType("code.model")
    module.__file__ = "/home/user/code/model.py"
    patch.setitem(sys.modules, "code.model", module)
    kind = type("Scale", (), {"level": 1.0, "__module__": "code.model"})
    steer(model, kind(), lambda held: held.level)
    yield
    kind.level = 0.5  # type: ignore[attr-defined]


def attribute_of_a_choice(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    patch.setattr(Choice.ONE, "factor", 1.0, raising=False)
    steer(model, Choice.ONE, lambda held: held.factor)
    yield
    patch.setattr(Choice.ONE, "factor", 0.5)


def attribute_of_bytes(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    layer = steer(model, Masked(b"1"), lambda held: held.factor)
    yield
    layer.held.factor = 0.5


def mask_of_an_array(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    held = np.ma.masked_array([1.0, 0.5], mask=[False, False])
    steer(model, held, lambda held: float(held.mean()))
    yield
    held[0] = np.ma.masked


def factory_of_a_dictionary(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    held: defaultdict[str, float] = defaultdict(lambda: 1.0)
    steer(model, held, lambda held: (held["factor"], held.clear())[0])
    yield
    held.default_factory = lambda: 0.5


def item_of_an_attribute_dictionary(
    model: Any, patch: pytest.MonkeyPatch, stack: ExitStack
) -> Change:
    held = AttributeDict(factor=1.0)
    steer(model, held, lambda held: held["factor"])
    yield
    held["factor"] = 0.5


def negated_view(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    weight = model.get_parameter(NAME)
    weight.data = torch._neg_view(weight.data)


def hidden_builtin(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    steer(model, -1.0, lambda held: abs(held) + 0)
    yield
    patch.setitem(globals(), "abs", lambda number: number)


def class_attribute(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    layer = steer(model, None, lambda _: 1.0)
    layer.read = lambda _: Steered.level
    yield
    patch.setattr(Steered, "level", 0.5)


def default_of_a_function(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    def read(_: Any, factor: float = 1.0) -> float:
        return factor

    steer(model, None, read)
    yield
    read.__defaults__ = (0.5,)


def attribute_of_a_function(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    def read(_: Any) -> Any:
        return read.factor  # type: ignore[attr-defined]

    read.factor = 1.0  # type: ignore[attr-defined]
    steer(model, None, read)
    yield
    read.factor = 0.5  # type: ignore[attr-defined]


def function_of_a_helper(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    steer(model, torch.ones(1), lambda held: HELPER.scale(held) + 0)
    yield
    patch.setattr(HELPER, "scale", lambda hidden: hidden * 0.5)


def helper_imported_in_a_function(
    model: Any, patch: pytest.MonkeyPatch, stack: ExitStack
) -> Change:
    def read(held: Any) -> Any:
        import steering_helper  # type: ignore[import-not-found]

        return steering_helper.scale(held)

    patch.setitem(sys.modules, "steering_helper", HELPER)
    steer(model, torch.ones(1), read)
    yield
    patch.setattr(HELPER, "scale", lambda hidden: hidden * 0.5)


def another_class(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    layer = steer(model, None, lambda _: 1.0)
    yield
    layer.__class__ = OtherSteered


def another_base(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    class Late(Steered):
        pass

    layer = steer(model, None, lambda _: 1.0)
    layer.__class__ = Late
    yield
    Late.__bases__ = (OtherSteered,)


def partial(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    layer = steer(model, None, functools.partial(lambda factor, _: factor, 1.0))
    yield
    layer.read = functools.partial(layer.read.func, 0.5)  # type: ignore[attr-defined]


def of_an_object(held: Any, attribute: str = "factor") -> Callable[..., Change]:
    """Return a change of an object that is an attribute of a layer."""

    def change(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
        layer = steer(model, held(), lambda held: getattr(held, attribute))
        yield
        setattr(layer.held, attribute, 0.5)

    return change


def object_in_containers(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    layer = steer(model, {"a": [(Plain(1.0),)]}, lambda held: held["a"][0][0].factor)
    yield
    layer.held["a"][0][0].factor = 0.5


def object_in_a_circle(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    layer = steer(model, Tree(), lambda held: held.parent.leaf.factor)
    yield
    layer.held.leaf.factor = 0.5


def items_of_a_set(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    layer = steer(model, {1.0}, lambda held: max(held) + 0)
    yield
    layer.held.add(2.0)


def array_of_numpy(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    layer = steer(model, np.ones(10_000), lambda held: float(held[7]))
    yield
    layer.held[7] = 0.5


def array_of_bytes(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    layer = steer(model, bytearray(b"\2" * 9), lambda held: held[3] / 2)
    yield
    layer.held[3] = 1


def tensor_in_an_object(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    layer = steer(model, Plain(torch.ones(64)), lambda held: held.factor)  # type: ignore[arg-type]
    yield
    layer.held.factor[5] = 0.5


def attribute_of_a_weight(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    weight = model.get_parameter(NAME)
    weight.factor = 1.0
    steer(model, None, lambda _: weight.factor)  # copies of a weight have no attributes
    yield
    weight.factor = 0.5


def weak_reference(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    target = Plain(1.0)
    stack.callback(lambda: target)
    steer(model, weakref.ref(target), lambda held: held().factor)
    yield
    target.factor = 0.5


def context_variable(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    steer(model, None, lambda _: VARIABLE.get())
    token = VARIABLE.set(1.0)
    stack.callback(lambda: VARIABLE.reset(token))
    yield
    VARIABLE.set(0.5)


def rows_by_numpy(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    model.get_parameter(NAME).detach().numpy()[37] *= 1.5


def rows_by_data(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    model.get_input_embeddings().weight.data[int(IDS[0, 5])] *= 1.5


def rows_by_dlpack(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    yield
    torch.utils.dlpack.from_dlpack(model.get_parameter(NAME).detach())[37] *= 1.5


def row_of_a_buffer_of_numpy(model: Any, patch: pytest.MonkeyPatch, stack: ExitStack) -> Change:
    shared = np.ones(64, np.float32)
    layer = steer(model, None, lambda _: 1.0)
    layer.register_buffer("factors", torch.from_numpy(shared))
    layer.read = lambda _: layer.factors
    yield
    shared[9] = 0.5


CHANGES: list[Callable[..., Change]] = [
    forward_of_a_class,
    forward_of_a_base,
    code_of_a_function,
    function_of_a_module,
    function_of_torch,
    activation_of_torch,
    method_of_tensors,
    registered_attention,
    local_attention,
    another_module,
    global_hook,
    global_hook_before,
    hook_of_a_layer,
    function_mode,
    dispatch_mode,
    closure,
    object_in_a_closure,
    global_name,
    global_by_its_name,
    attribute_by_its_name,
    attribute_made_by_a_module,
    class_of_a_class,
    class_in_a_package_named_as_a_standard_one,
    attribute_of_a_choice,
    attribute_of_bytes,
    mask_of_an_array,
    factory_of_a_dictionary,
    item_of_an_attribute_dictionary,
    negated_view,
    hidden_builtin,
    class_attribute,
    default_of_a_function,
    attribute_of_a_function,
    function_of_a_helper,
    helper_imported_in_a_function,
    another_class,
    another_base,
    partial,
    object_in_containers,
    object_in_a_circle,
    items_of_a_set,
    array_of_numpy,
    array_of_bytes,
    tensor_in_an_object,
    attribute_of_a_weight,
    weak_reference,
    context_variable,
    rows_by_numpy,
    rows_by_data,
    rows_by_dlpack,
    row_of_a_buffer_of_numpy,
    *(
        of_an_object(kind)
        for kind in (
            lambda: Plain(1.0),
            lambda: Slotted(1.0),
            lambda: Data(1.0),
            lambda: types.SimpleNamespace(factor=1.0),
        )
    ),
]
PASSED = [
    global_hook,
    global_hook_before,
    hook_of_a_layer,
    function_mode,
    dispatch_mode,
    negated_view,
]
"""Changes that pass calls through: these answer as they do without chunks."""
NAMES = [change.__name__ for change in CHANGES[:-4]]
NAMES += ["plain object", "slots", "dataclass", "SimpleNamespace"]


@pytest.mark.parametrize("is_inference", [False, True], ids=["plain", "inference"])
@pytest.mark.parametrize("change", CHANGES, ids=NAMES)
def test_a_change_of_any_kind_finds_nothing(
    change: Callable[..., Change], is_inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        if is_inference:  # its tensors have no versions
            stack.enter_context(torch.inference_mode())
        model = small_model()
        steps = change(model, monkeypatch, stack)
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
