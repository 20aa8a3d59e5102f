"""SGLang's own copies stay where kvtier's on Ascend cannot be used, or fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.connectors.sglang import plugin
from kvtier.connectors.sglang.copies import ascend_copies
from kvtier.connectors.sglang.copies.ascend_copies import LOSS, AscendCopies
from kvtier.core.errors import DeviceError
from kvtier.devices import Finding
from tests.connectors.ascend_harness import BATCH, Harnesss, at_pages, raw, scramble, warnings_in


def test_without_a_batch_call_sglangs_own_copies_are_left(
    ascends: Harnesss, caplog: pytest.LogCaptureFixture
) -> None:
    harness = ascends("cann83")
    pool = harness.mha(layers=2)
    at = at_pages(pool, (0,), (1,))
    if not harness.device.paths.why_not:
        harness.fake.refuse_batches()
    harness.back_up(pool, at)
    harness.load_all(pool, at)
    assert [layer for _, layer in harness.theirs] == [None, 0, 1]
    assert len(warnings_in(caplog)) == 1


def test_refused_batch_is_the_last_one(ascends: Harnesss, caplog: pytest.LogCaptureFixture) -> None:
    harness = ascends()
    harness.fake.refuse_batches()
    pool = harness.mha(layers=3, page=128, heads=8, dim=64)
    harness.load_all(pool, at_pages(pool, (0, 1), (2, 1)))
    assert [layer for _, layer in harness.theirs] == [0, 1, 2]
    (said,) = warnings_in(caplog)
    assert "207000" in said
    assert LOSS in said


def test_failed_load_is_done_again_by_sglang_and_so_are_those_on_their_way(
    ascends: Harnesss, caplog: pytest.LogCaptureFixture
) -> None:
    harness = ascends()
    first, second = (harness.mha(layers=4, page=128, heads=8, dim=64) for _ in range(2))
    at = at_pages(first, (0, 1, 2, 3), (2, 1, 4, 3))
    for layer in range(4):
        if layer == 2:
            harness.fake.fail_call(BATCH, 507013)
        harness.load(first, at, layer)
        harness.load(second, at, layer)
    again = [(pool is first, layer) for pool, layer in harness.theirs]
    assert again == [(True, 0), (False, 0), (True, 3), (False, 3)], "all layers come with layer 0"
    assert harness.fake.num_pending == 0, "nothing of ours is in flight when SGLang's copies begin"
    (said,) = warnings_in(caplog)
    assert "507013" in said


def test_failed_back_up_is_done_by_sglang(ascends: Harnesss) -> None:
    harness = ascends()
    pool = harness.mha(layers=2)
    harness.fake.fail_call(BATCH, 507013)
    harness.back_up(pool, at_pages(pool, (0,), (1,)))
    harness.back_up(pool, at_pages(pool, (0,), (1,)))
    assert harness.theirs == [(pool, None)] * 2


def test_sglangs_copies_begin_when_ours_have_ended(ascends: Harnesss) -> None:
    """A load is on its way when a back-up fails, each on a stream of its own, as SGLang's are."""
    harness = ascends(seed=2, delay_us=10_000)
    pool = harness.mha(layers=16, page=128, heads=8, dim=64)

    def look() -> None:
        for device, host in pool.pairs():
            assert torch.equal(raw(device[:, [7, 5]]), raw(host[[0, 2]].transpose(0, 1)))

    harness.when_theirs = look
    harness.load_all(pool, at_pages(pool, (0, 2), (7, 5)))
    harness.stream = harness.fake.compute_stream()
    harness.fake.fail_call(BATCH, 507013)
    harness.back_up(pool, at_pages(pool, (1,), (1,)))
    assert harness.theirs == [(pool, None)]


@pytest.mark.parametrize("found", ["no driver", "torch's copies", "an error"])
def test_without_a_device_sglangs_own_copies_are_left(
    ascends: Harnesss, found: str, caplog: pytest.LogCaptureFixture
) -> None:
    def look(name: str) -> Any:
        assert name == "npu:0"
        if found == "an error":
            raise DeviceError("a plug-in made no device")
        other = SimpleNamespace() if found == "torch's copies" else None
        return other, [Finding("ascend", "no", "libascendcl.so was not found")]

    harness = ascends()
    harness.copies = AscendCopies(look)
    pool = harness.mla(2)
    harness.load_all(pool, at_pages(pool, (0,), (1,)))
    assert [layer for _, layer in harness.theirs] == [0, 1]
    (said,) = warnings_in(caplog)
    assert ("a plug-in" if found == "an error" else "libascendcl.so was not found") in said
    assert said.endswith(LOSS)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "page_first_direct"},
        {"dcp_size": 2},
        {"_is_dummy": True},
        {"_layer_shard_enabled": True},
    ],
)
def test_pool_that_is_not_served_is_left_and_that_is_said_once(
    ascends: Harnesss, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    harness = ascends()
    pool, served = harness.mla(2), harness.mla(2)
    hook = harness.copies.hooks["sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost"
                                ".backup_from_device_all_layer"]  # fmt: skip
    vars(pool).update(change)
    called: list[Any] = []
    for each in (pool, pool, served):
        at = at_pages(each, (0,), (1,))
        hook(lambda own, *_: called.append(own), each, None, *at, ascend_copies.IO_BACKEND)
    harness.finish()
    assert called == [pool, pool]
    assert len(warnings_in(caplog)) == 1


def test_other_ways_of_sglangs_are_not_touched(ascends: Harnesss) -> None:
    harness = ascends()
    pool = harness.mha(2)
    at = at_pages(pool, (0,), (1,))
    harness.load(pool, at, 1, io_backend="kernel", is_draft=True)
    harness.back_up(pool, at, io_backend="direct")
    on_device = SimpleNamespace(device=SimpleNamespace(type="npu"))
    harness.load(pool, (at[0], on_device), 0)  # type: ignore[arg-type]
    assert [layer for _, layer in harness.theirs] == [1, None, 0]
    assert harness.fake.count(BATCH) == 0


@pytest.mark.parametrize("wrong", ["odd tokens", "no such page", "another mirror"])
def test_what_is_no_page_is_left_to_sglang(ascends: Harnesss, wrong: str) -> None:
    harness = ascends()
    pool = harness.mha(2)
    at = at_pages(pool, (0, 1), (1, 2))
    if wrong == "odd tokens":
        at = (at[0][:-1], at[1])
    elif wrong == "no such page":
        at = at_pages(pool, (0, 1), (1, 99))
    else:
        cut = scramble(torch.empty(9, 2, 4, 1, 8, dtype=torch.bfloat16))
        buffers = [(keys, values, cut, cut) for keys, values, *_ in pool._npu_transfer_buffers()]
        pool._npu_transfer_buffers = lambda: iter(buffers)
    harness.back_up(pool, at)
    assert harness.theirs == [(pool, None)]
    assert harness.fake.count(BATCH) == 0


# -- when it is enabled ----------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Names that are hooked in a process of a stand-in for SGLang."""

    def register(is_npu: Callable[[], bool], wanted: str | None) -> list[str]:
        found: list[str] = []
        registry = ModuleType("hook_registry")
        vars(registry).update(
            HookRegistry=SimpleNamespace(register=lambda name, *_: found.append(name)),
            HookType=SimpleNamespace(AROUND=1, REPLACE=2),
        )
        utils = ModuleType("utils")
        vars(utils).update(is_cpu=lambda: False, is_npu=is_npu)
        for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
        monkeypatch.setitem(sys.modules, "sglang.srt.utils", utils)
        monkeypatch.setattr(plugin, "wrapping_hooks", dict)
        monkeypatch.delenv(plugin.COPIES_VARIABLE, raising=False)
        if wanted is not None:
            monkeypatch.setenv(plugin.COPIES_VARIABLE, wanted)
        plugin.register()
        return found

    return register


@pytest.mark.parametrize("wanted", [None, "", "0"])
def test_nothing_is_hooked_for_those_who_do_not_ask(
    registered: Callable[..., list[str]], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "kvtier.connectors.sglang.copies.ascend_copies"
    monkeypatch.delitem(sys.modules, name)
    assert registered(pytest.fail, wanted) == []
    assert name not in sys.modules


def test_those_who_ask_get_the_hooks_on_an_npu_only(
    registered: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> bool:
        raise RuntimeError("torch_npu detected, but NPU device is not available or visible.")

    contract = SimpleNamespace(COPIES=SimpleNamespace(differences=list))
    monkeypatch.setitem(sys.modules, "kvtier.connectors.sglang.shared.contract", contract)
    assert registered(lambda: True, "1") == list(ascend_copies.COPIES.hooks)
    assert registered(lambda: False, "1") == []
    assert registered(lost, "1") == []


def test_another_sglang_is_left_as_it_is(
    registered: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    assert registered(lambda: True, "1") == []
    (said,) = warnings_in(caplog)
    assert said == f"kvtier leaves its copies to SGLang: SGLang is not installed; {LOSS}"


def test_hooks_that_did_not_take_are_told_when_sglang_makes_its_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[str] = []
    AscendCopies().hooks[ascend_copies.ENGINE](made.append, "kernel_ascend")
    assert made == ["kernel_ascend"]
    (said,) = warnings_in(caplog)
    assert said.endswith(LOSS)
