"""kvtier's copies on Ascend around SGLang's own classes.

Its host pools over CPU tensors that a simulated driver takes for an NPU's, and its engine that goes
from layer to layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

import pkgutil

import torch
from sglang.srt import utils
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
    MLASplitBuffers,
)
from sglang.srt.mem_cache.pool_host import mha, mla
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvtier.connectors.sglang import plugin
from kvtier.connectors.sglang.copies import ascend_copies
from kvtier.connectors.sglang.shared.contract import COPIES
from kvtier.devices.base import Memory
from tests.connectors.ascend_harness import BATCH, NUM_DEVICE, AscendHarness, raw, scramble, tokens

PAGE, LAYERS, HEADS, DIM = 16, 3, 2, 8
CPU = torch.device("cpu")
KINDS = ("mha", "mha and a draft", "mla", "mla with an indexer", "mla and a draft")


@pytest.fixture
def harness() -> Iterator[AscendHarness]:
    made = AscendHarness(seed=1)
    yield made
    made.close()


def _mha(harness: AscendHarness, num_drafts: int) -> Any:
    def info(layers: int) -> MHABufferInfo:
        shape = (layers, NUM_DEVICE, PAGE, HEADS, DIM)
        keys, values = (harness.on_device(*shape) for _ in range(2))
        buffers = KVBuffers(
            k=tuple(keys),
            v=tuple(values),
            k_data_ptrs=None,
            v_data_ptrs=None,
            layout=KVBufferLayout.PAGED_NHD,
        )
        return MHABufferInfo(
            buffers=buffers,
            page_size=PAGE,
            head_num=HEADS,
            head_dim=DIM,
            v_head_dim=DIM,
            dtype=keys.dtype,
            device=CPU,
            transfer_buffers=lambda: (keys, values),
        )

    drafts = tuple(info(1) for _ in range(num_drafts))
    return _host(mha.MHATokenToKVPoolHost, info(LAYERS), "page_first_direct", drafts)


def _mla(harness: AscendHarness, indexed: tuple[int, ...], num_drafts: int) -> Any:
    def info(layers: int, indexed: tuple[int, ...]) -> MLABufferInfo:
        shape = (layers, NUM_DEVICE, PAGE, 1)
        native = MLASplitBuffers(
            k=harness.on_device(*shape, 24),
            v=harness.on_device(*shape, 8),
            index_k=harness.on_device(len(indexed), *shape[1:], 16) if indexed else None,
            index_scales=None,
            index_layer_indices=indexed,
            k_width=24,
            v_width=8,
            index_width=16 if indexed else 0,
        )
        return MLABufferInfo(
            buffers=native,
            native_buffers=lambda: native,
            data_ptrs=None,
            layer_indices=tuple(range(layers)),
            device_layer_num=layers,
            page_size=PAGE,
            kv_lora_rank=24,
            qk_rope_head_dim=8,
            kv_cache_dim=32,
            dtype=torch.bfloat16,
            device=CPU,
        )

    drafts = tuple(info(1, ()) for _ in range(num_drafts))
    first = info(LAYERS, indexed)
    own = {"target_layer_num": LAYERS}
    return _host(mla.MLATokenToKVPoolHost, first, "page_first_kv_split", drafts, **own)


def _host(kind: Any, info: Any, layout: str, drafts: tuple[Any, ...], **own: int) -> Any:
    return kind(
        info,
        1.2,
        0,
        PAGE,
        layout,
        pin_memory=False,
        draft_buffer_infos=drafts,
        device_capacity_tokens=(NUM_DEVICE - 1) * PAGE,
        start_layer=0,
        end_layer=LAYERS,
        **own,
    )


def _pool(harness: AscendHarness, kind: str) -> Any:
    """One of SGLang's, in random page-locked memory."""
    num_drafts = int("draft" in kind)
    if kind.startswith("mha"):
        pool = _mha(harness, num_drafts)
    else:
        pool = _mla(harness, (0, 2) if "indexer" in kind else (), num_drafts)
    for host_buffer in _host_buffers(pool):
        scramble(host_buffer)
        memory = Memory(host_buffer.data_ptr(), host_buffer.nbytes, "host", host_buffer)
        assert harness.device.page_lock(memory)
        harness._locked.append(memory)
    return pool


def _host_buffers(pool: Any) -> list[torch.Tensor]:
    if pool.layout == "page_first_direct":
        return [pool.kv_buffer]
    buffers = (pool.k_buffer, pool.v_buffer, pool.index_k_buffer)
    return [buffer for buffer in buffers if buffer is not None]


def _exchange(device_indices: Any, host_indices: Any, page_size: int, direction: int,
              **tensors: Any) -> None:  # fmt: skip
    """Do what SGLang's own call does on an NPU: all layers of a page at once."""
    at_device, at_host = (each[::page_size] // page_size for each in (device_indices, host_indices))
    for name, device in tensors.items():
        host = tensors.get(name.replace("device", "host"))
        if not name.startswith("device") or device is None or host is None:
            continue
        for page, mirror in zip(at_device.tolist(), at_host.tolist(), strict=True):
            if direction == 1:
                device[:, page] = host[mirror]
            else:
                host[mirror] = device[:, page]


@pytest.fixture(autouse=True)
def _an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide what SGLang imports on an NPU only."""
    for module in (mha, mla):
        monkeypatch.setattr(module, "transfer_kv_dim_exchange", _exchange, raising=False)
        directions = SimpleNamespace(H2D=1, D2H=2)
        monkeypatch.setattr(module, "TransferDirection", directions, raising=False)


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Callable[[AscendHarness], None]:
    """Puts a harness's copies around SGLang's own, as its registry does it."""

    def hook(harness: AscendHarness) -> None:
        for name in harness.copies.hooks:
            place, _, method = name.rpartition(".")
            owner = pkgutil.resolve_name(place)
            monkeypatch.setattr(owner, method, _around(harness, name, getattr(owner, method)))

    return hook


def _around(harness: AscendHarness, name: str, own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own)
    def wrapped(*args: Any, **more: Any) -> None:
        harness.copies.hooks[name](own, *args, **more)

    return wrapped


def _engine_moves(harness: AscendHarness, pool: Any) -> list[torch.Tensor]:
    """SGLang's engine backs up pages and loads them into others.

    Returns the bytes of the host pool and of the device's afterwards.
    """
    engine = l2_transfer.L2TransferEngine("kernel_ascend")
    in_host = tokens(PAGE, 5, 1, 2)

    def transfers(*pages: int) -> list[Any]:
        common = {"host_pool": pool, "device_pool": None, "host_indices": in_host}
        model = l2_transfer.L2Transfer(device_indices=tokens(PAGE, *pages), **common)
        if pool.layer_num == LAYERS:
            return [model]
        draft = model._replace(
            layer_mapper=lambda layer: LAYERS if layer == 0 else None, is_draft=True
        )
        return [model, draft]

    engine.submit_device_to_host(transfers(3, 4, 7)[:1])
    events: list[Any] = []
    engine.submit_host_to_device(
        transfers(8, 1, 2),
        transfer_layer_id_max=LAYERS,
        start_event=SimpleNamespace(wait=lambda stream: None),
        on_layer_done=lambda layer: events.append(harness.device.fence()),
    )
    assert len(events) == LAYERS
    events[-1].wait()
    return [raw(each) for each in (*_host_buffers(pool), *harness._adopted)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_kvtier_moves_is_what_sglang_moves(
    harness: AscendHarness, kind: str, hooked: Callable[[AscendHarness], None]
) -> None:
    pool = _pool(harness, kind)
    tensors = (*_host_buffers(pool), *harness._adopted)
    begin = [raw(tensor) for tensor in tensors]
    theirs = _engine_moves(harness, pool)
    assert harness.fake.count(BATCH) == 0
    for tensor, old in zip(tensors, begin, strict=True):
        tensor.view(torch.uint8).copy_(old)
    hooked(harness)
    ours = _engine_moves(harness, pool)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert not all(torch.equal(*pair) for pair in zip(ours, begin, strict=True))
    assert harness.copies.why_not == ""
    assert harness.fake.count(BATCH) == 2, "so little is one group"
    assert harness.fake.count("synchronous_copies") == 0


def test_other_io_of_sglangs_is_untouched(
    harness: AscendHarness, hooked: Callable[[AscendHarness], None]
) -> None:
    pool = _pool(harness, "mha")
    hooked(harness)
    with pytest.raises(ValueError, match="Unsupported IO backend: no such"):
        pool.load_to_device_per_layer(None, tokens(PAGE, 0), tokens(PAGE, 1), 0, "no such")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own, empty, on what it takes for an NPU; put back at the end."""
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(utils, "is_npu", lambda: True)
    for name in ascend_copies.COPIES.hooks:
        place, _, method = name.rpartition(".")
        owner = pkgutil.resolve_name(place)
        monkeypatch.setattr(owner, method, getattr(owner, method))


@pytest.mark.usefixtures("registry")
def test_hooks_take_in_sglangs_registry(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(plugin.COPIES_VARIABLE, "1")
    plugin.register()
    names = set(ascend_copies.COPIES.hooks)
    assert names <= set(HookRegistry._hooks)
    for name in set(HookRegistry._hooks) - names:
        del HookRegistry._hooks[name]
    l2_transfer.L2TransferEngine("kernel_ascend")
    HookRegistry.apply_hooks()
    l2_transfer.L2TransferEngine("kernel_ascend")
    assert [message for message in caplog.messages if "are not installed" in message] == []
    theirs = mla.MLATokenToKVPoolHost.load_to_device_per_layer.__wrapped__
    monkeypatch.setattr(mla.MLATokenToKVPoolHost, "load_to_device_per_layer", theirs)
    l2_transfer.L2TransferEngine("kernel_ascend")
    (said,) = [message for message in caplog.messages if "are not installed" in message]
    assert said == (
        "kvtier's hooks are not installed: sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost."
        f"load_to_device_per_layer; {ascend_copies.LOSS}"
    )


@pytest.mark.usefixtures("registry")
def test_nothing_is_registered_for_those_who_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.COPIES_VARIABLE, raising=False)
    plugin.register()
    around = {name for name, hooks in HookRegistry._hooks.items() if hooks[0][0] is HookType.AROUND}
    assert around
    assert around.isdisjoint(ascend_copies.COPIES.hooks)


def test_installed_sglang_has_what_the_copies_rely_on() -> None:
    assert COPIES.differences() == []
