"""The contract with SGLang, compared with the installed SGLang."""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvtier.connectors.common.contract import version_of
from kvtier.connectors.sglang.entry import KvtierStorage
from kvtier.connectors.sglang.shared.contract import OPTIONS, OVERRIDDEN, STORAGE
from kvtier.observe.specs import SGLANG_OWN
from kvtier.tools.cli.detect import engines


def test_installed_sglang_differs_in_nothing() -> None:
    folder = STORAGE.installed()
    assert folder is not None
    assert version_of(folder) == sglang.__version__
    assert STORAGE.differences() == []
    assert [engine.note for engine in engines() if engine.topic == "sglang"] == [
        "served: kvtier sglang-args prints the option for it"
    ]


def test_every_option_that_people_are_told_to_give_is_there() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert set(OPTIONS) <= set(parser._option_string_actions)


def test_everything_that_is_overridden_is_in_the_contract() -> None:
    ours = {name for name in vars(KvtierStorage) if not name.startswith("_")}
    theirs = {name for name in dir(HiCacheStorage) if not name.startswith("_")}
    new = {"on_host_pools_registered"}  # since 0.5.23
    assert ours & theirs - new == set(OVERRIDDEN["HiCacheStorage"])
    for name in OVERRIDDEN["HiCacheStorage"]:
        own = inspect.signature(getattr(KvtierStorage, name))
        base = inspect.signature(getattr(HiCacheStorage, name))
        assert list(own.parameters) == list(base.parameters), name


def test_dashboard_asks_for_metrics_that_sglang_has() -> None:
    from sglang.srt.observability import metrics_collector

    source = inspect.getsource(metrics_collector)
    for spec in SGLANG_OWN:
        made = rf'\b{spec.kind}\(\s*name="{spec.name}".{{0,1500}}?\)\n'
        found = re.search(made, source, re.DOTALL | re.IGNORECASE)
        assert found, spec
        assert all(f'"{label}"' in found[0] for label in spec.labels), spec


def test_comparison_imports_neither_sglang_nor_torch() -> None:
    script = (
        "import sys; from kvtier.connectors.sglang.shared.contract import STORAGE;"
        "STORAGE.differences();"
        "print([name for name in ('sglang', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_hooks_that_did_not_take_are_told_with_what_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvtier.connectors.sglang.copies import cpu_copies
    from kvtier.connectors.sglang.plugin import register, wrapping_hooks
    from kvtier.connectors.sglang.shared.hooks import tell_missing

    hooks = {**wrapping_hooks(), **cpu_copies.hooks()}
    tell_missing(hooks, "this and that")
    assert "kvtier's hooks are not installed: " in caplog.text
    assert "run_batch" in caplog.text  # SGLang's own decorators are no hooks
    assert "backup_from_device_all_layer" in caplog.text
    assert caplog.text.strip().endswith("this and that")
    caplog.clear()
    register()
    HookRegistry.apply_hooks()
    tell_missing(hooks, "this and that")
    assert "are not installed" not in caplog.text
