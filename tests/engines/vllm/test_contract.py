"""The contract with the installed vLLM: ``make test-vllm``."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.config import KVTransferConfig

from kvtier.connectors.common.contract import Sources, version_of
from kvtier.connectors.vllm.offloading.contract import OPTIONS
from kvtier.connectors.vllm.shared.fronts import OFFLOADING, choose, front_named
from kvtier.connectors.vllm.shared.registry import CONNECTOR_NAME, wrap_factory

NAME = os.environ.get("KVTIER_CONNECTOR", "")
FRONT = front_named(NAME) if NAME else choose().front or OFFLOADING
CONTRACT = FRONT.contract
"""With the connector that serves this version, or the requested one."""


def _folder() -> Path:
    folder = CONTRACT.installed()
    assert folder is not None
    return folder


def _files() -> list[str]:
    """Return the contract's files that exist.

    If a version has no such file, the first test fails, unless the contract requires nothing of it.
    """
    return [file for file in CONTRACT.files if (_folder() / file).exists()]


def _classes() -> dict[str, type]:
    """Return the contract's classes, imported."""
    found: dict[str, type] = {}
    for file in _files():
        module = import_module("vllm." + file.removesuffix(".py").replace("/", "."))
        found |= {
            name: each
            for name, each in vars(module).items()
            if isinstance(each, type) and each.__module__ == module.__name__
        }
    return found


def test_installed_vllm_is_as_kvtier_knows_it() -> None:
    assert version_of(_folder()) == vllm.__version__
    assert CONTRACT.differences() == []


def test_every_option_that_people_are_told_to_give_is_there() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    assert set(OPTIONS) <= set(parser._option_string_actions)


def test_written_sources_say_what_the_imported_classes_say() -> None:
    """No decorator, patch or generated method stands between the two."""
    classes = _classes()
    sources = Sources(_folder(), CONTRACT.files)
    for name, methods in (*CONTRACT.overridden.items(), *CONTRACT.called.items()):
        for method in methods:
            if f"{name}.{method}" in CONTRACT.optional and not hasattr(classes[name], method):
                continue
            written = sources.parameters(name, method)
            static = inspect.getattr_static(classes[name], method)
            found = inspect.signature(getattr(static, "__func__", static))
            names = [
                "**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name
                for parameter in found.parameters.values()
            ][1:]
            assert written is not None, f"{name}.{method}"
            assert list(written) == names, f"{name}.{method}"


def test_doctor_can_ask_without_importing_vllm_or_torch() -> None:
    script = (
        "import sys; from kvtier.connectors.vllm.shared import fronts; fronts.choose();"
        "print([name for name in ('vllm', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(FRONT is not OFFLOADING, reason="another connector serves this version")
def test_moved_signature_of_the_real_thing_is_a_sentence(tmp_path: Path) -> None:
    for file in (*_files(), "_version.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_folder() / file, tmp_path / file)
    base = tmp_path / CONTRACT.files[0]
    text = base.read_text()
    assert "def wait(self, job_ids: set[int])" in text
    base.write_text(
        text.replace("def wait(self, job_ids: set[int])", "def wait(self, deadline: float)")
    )
    (sentence,) = CONTRACT.differences(tmp_path)
    assert sentence.startswith(
        f"vLLM {vllm.__version__}: OffloadingWorker.wait takes (deadline); kvtier knows (job_ids): "
    )


class Recorded:
    """A connector whose arguments are compared."""

    def __init__(self, vllm_config: object, role: object, kv_cache_config: object) -> None:
        self.arguments = (vllm_config, role, kv_cache_config)


NOT_ASKING: list[dict[str, Any]] = [
    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
    {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 1},
    },
    {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]
        },
    },
    {"kv_connector": "Recorded", "kv_role": "kv_both"},
    {"kv_connector": "Recorded", "kv_role": "kv_both", "kv_connector_module_path": __name__},
    {"kv_connector": "Unknown", "kv_role": "kv_both"},
    {"kv_connector": "Unknown", "kv_role": "kv_both", "kv_connector_module_path": __name__},
]
"""Configurations that name no part of kvtier."""


def _factory() -> Any:
    """Return a factory of vLLM's that no plug-in has met."""
    name = "vllm.distributed.kv_transfer.kv_connector.factory"
    spec = find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    factory = module.KVConnectorFactory
    factory.register_connector("Recorded", __name__, "Recorded")
    return factory


def _outcome(call: Callable[..., Any], *arguments: object) -> object:
    """Return what a call returns or raises, in a form that can be compared."""
    try:
        found = call(*arguments)
    except Exception as error:
        return type(error), str(error)
    return found.arguments if isinstance(found, Recorded) else found


def _outcomes(factory: Any) -> dict[str, list[object]]:
    """Return what every method of a factory answers."""
    found: dict[str, list[object]] = {}
    for given in NOT_ASKING:
        config = KVTransferConfig(**given, engine_id="engine")
        scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=True)
        engine = SimpleNamespace(
            kv_transfer_config=config if given["kv_connector"] == "Recorded" else None,
            scheduler_config=scheduler,
        )
        calls: dict[str, tuple[object, ...]] = {
            "get_connector_class": (config,),
            "_get_connector_class_with_compat": (config,),
            "supports_hma_config": (config,),
            "get_connector_class_by_name": (given["kv_connector"],),
            "create_connector": (engine, "role", "kv_cache_config"),
            "register_connector": (given["kv_connector"], "module", "Name"),
        }
        methods = {name for name, each in vars(factory).items() if isinstance(each, classmethod)}
        assert methods <= calls.keys(), f"methods that nothing compares: {methods - calls.keys()}"
        for name in sorted(methods):
            found.setdefault(name, []).append(_outcome(getattr(factory, name), *calls[name]))
    return found


def test_vllm_that_does_not_ask_for_kvtier_does_not_notice_it() -> None:
    plain, wrapped = _factory(), _factory()
    wrap_factory(wrapped)
    assert vars(wrapped).keys() == vars(plain).keys()
    assert _outcomes(wrapped) == _outcomes(plain)
    assert type(wrapped._registry) is dict
    assert wrapped._registry.keys() == plain._registry.keys()
    assert [each.__qualname__ for each in wrapped._registry.values()] == [
        each.__qualname__ for each in plain._registry.values()
    ]


def test_vllm_that_asks_for_kvtier_gets_its_connector() -> None:
    factory = _factory()
    wrap_factory(factory)
    asking = {
        "kv_connector": CONNECTOR_NAME,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "kvtier"},
    }
    found = factory.get_connector_class(KVTransferConfig(**asking))
    ours = [base for base in found.__mro__ if base.__module__.startswith("kvtier.")]
    assert bool(ours) == (FRONT is OFFLOADING), "an older vLLM keeps its own"
