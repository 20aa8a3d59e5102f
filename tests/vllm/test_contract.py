"""The contract with the vLLM that is installed: ``make test-vllm``."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from kvtier.connectors.common.contract import Sources, version_of  # noqa: E402
from kvtier.connectors.vllm.fronts import OFFLOADING, choose, front_named  # noqa: E402
from kvtier.connectors.vllm.offloading.contract import OPTIONS  # noqa: E402

NAME = os.environ.get("KVTIER_CONNECTOR", "")
FRONT = front_named(NAME) if NAME else choose().front or OFFLOADING
CONTRACT = FRONT.contract
"""With the connector that serves this version, or the one asked for."""


def _folder() -> Path:
    folder = CONTRACT.installed()
    assert folder is not None
    return folder


def _files() -> list[str]:
    """Those that are there: a version without one fails the first test, or lacks nothing in it."""
    return [each for each in CONTRACT.files if (_folder() / each).exists()]


def _classes() -> dict[str, type]:
    """Those of the contract, imported."""
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
                "**" if each.kind is each.VAR_KEYWORD else each.name
                for each in found.parameters.values()
            ][1:]
            assert written is not None, f"{name}.{method}"
            assert list(written) == names, f"{name}.{method}"


def test_doctor_can_ask_without_importing_vllm_or_torch() -> None:
    script = (
        "import sys; from kvtier.connectors.vllm import fronts; fronts.choose();"
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
