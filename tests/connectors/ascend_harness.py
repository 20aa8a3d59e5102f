"""SGLang's pools on a fake Ascend device, with kvtier's copies around SGLang's own."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.connectors.sglang.copies.ascend_copies import IO_BACKEND, POOLS, AscendCopies
from kvtier.devices.base import Memory
from kvtier.devices.driver_device import DriverDevice
from tests.devices.drivers import make_device, page_locked
from tests.kit.fakes.fake import Fake

NUM_DEVICE, NUM_HOST = 9, 7
BATCH = "aclrtMemcpyBatchAsync"
Harnesss = Callable[..., "AscendHarness"]
"""Makes a harness that is judged at the end (conftest.py)."""
CLASSES = {name.rpartition(".")[2][:3].lower(): name for name in POOLS}
"""By kind, "mha" or "mla", the full name of SGLang's class."""


class AscendHarness:
    """One NPU.

    SGLang copies on ``stream``. ``theirs`` records the copies that SGLang makes itself: (pool,
    layer) of a load, (pool, None) of a back-up.
    """

    def __init__(self, variant: str = "cann85", seed: int = 0, delay_us: int = 50) -> None:
        self.fake = Fake(variant)
        self.fake.reset(seed, late_reads=seed % 2 == 1, max_delay_us=delay_us * (seed % 3))
        self.stream = self.fake.compute_stream()
        self.device: DriverDevice = make_device(self.fake, 0, lambda: self.stream)
        self.copies = AscendCopies(lambda _: (self.device, []))
        self.theirs: list[tuple[Any, int | None]] = []
        self.when_theirs: Callable[[], None] = lambda: None
        self._locked: list[Memory] = []
        self._adopted: list[torch.Tensor] = []

    def close(self) -> None:
        """Check that everything was released, and that a real machine would accept every call."""
        for memory in self._locked:
            self.device.unlock(memory)
        self.copies = AscendCopies()
        gc.collect()
        self.device.close()
        for tensor in self._adopted:
            self.fake.disown(tensor.data_ptr())
        assert self.fake.violations == []
        assert self.fake.leaks == []

    # -- pools ------------------------------------------------------------------------------------

    def on_device(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return device memory with random bytes, which only the driver should touch."""
        found = torch.empty(shape, dtype=dtype)
        return self.adopt(found)

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            scramble(tensor)
            self.fake.adopt(tensor.data_ptr(), tensor.nbytes)
            self._adopted.append(tensor)
        return tensor

    def in_host(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return page-locked host memory with random bytes."""
        count = int(np.prod(shape))
        memory = page_locked(self.device, -(-count * dtype.itemsize // 4096) * 4096)
        self._locked.append(memory)
        owner: Any = memory.owner
        return scramble(torch.frombuffer(owner, dtype=dtype, count=count).view(shape))

    def mha(self, layers: int, page: int = 4, heads: int = 2, dim: int = 8, drafts: int = 0) -> Any:
        """Return a stand-in for SGLang's MHA pools: keys and values of a model, and of drafts."""
        tail = (page, heads, dim)
        device = [
            [self.on_device(count, NUM_DEVICE, *tail) for _ in range(2)]
            for count in (layers, *[1] * drafts)
        ]
        host = [self.in_host(NUM_HOST, layers + drafts, *tail) for _ in range(2)]
        return self._pool("page_first_direct", page, layers, device, host, [])

    def mla(self, layers: int, indexed: Sequence[int] = (), page: int = 4, drafts: int = 0) -> Any:
        """Return a stand-in for MLA pools. indexed: layers that have an indexer, with scales."""
        device = [
            [self.on_device(count, NUM_DEVICE, page, 1, dim) for dim in (24, 8)]
            for count in (layers, *[1] * drafts)
        ]
        host = [self.in_host(NUM_HOST, layers + drafts, page, 1, dim) for dim in (24, 8)]
        if indexed:
            kinds = ((16, torch.bfloat16), (1, torch.float32))
            for dim, dtype in kinds:
                shape = (len(indexed), NUM_DEVICE, page, 1, dim)
                device[0].append(self.on_device(*shape, dtype=dtype))
                host.append(self.in_host(NUM_HOST, len(indexed), page, 1, dim, dtype=dtype))
        return self._pool("page_first_kv_split", page, layers, device, host, indexed)

    def _pool(
        self,
        layout: str,
        page: int,
        layers: int,
        device: list[list[torch.Tensor]],
        host: list[torch.Tensor],
        indexed: Sequence[int],
    ) -> Any:
        def cut() -> Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]:
            begin = 0
            for number, tensors in enumerate(device):
                end = begin + len(tensors[0])
                mirrors = [each[:, begin:end] for each in host[:2]]
                yield tensors, [*mirrors, *(host[2:] if number == 0 else ())]
                begin = end

        def split() -> Iterable[Any]:
            for own, mirrors in cut():
                names = ("k", "v", "index_k", "index_scales")
                native = dict.fromkeys(names) | dict(zip(names, own, strict=False))
                yield (
                    SimpleNamespace(**native, index_layer_indices=tuple(indexed)),
                    *(mirrors + [None] * 2)[:4],
                )

        return SimpleNamespace(
            layout=layout,
            page_size=page,
            dcp_size=1,
            target_layer_num=layers,
            _transfer_device="npu:0",
            _npu_transfer_buffers=lambda: ((*own, *mirrors) for own, mirrors in cut()),
            _npu_transfer_pool_slices=split,
            pairs=lambda: [pair for cuts in cut() for pair in zip(*cuts, strict=True)],
        )

    # -- what SGLang calls ------------------------------------------------------------------------

    def load(self, pool: Any, at: Sequence[torch.Tensor], layer: int, **more: Any) -> None:
        """Load a layer. at: indices of tokens in host memory, and on the device."""

        def theirs(pool: Any, _: object, __: object, ___: object, layer: int, *____: Any,
                   **_____: Any) -> None:  # fmt: skip
            self.theirs.append((pool, layer))

        self._hook(pool, "load_to_device_per_layer")(
            theirs, pool, None, *at, layer, more.pop("io_backend", IO_BACKEND), **more
        )

    def load_all(self, pool: Any, at: Sequence[torch.Tensor]) -> None:
        for layer in range(pool.target_layer_num):
            self.load(pool, at, layer)

    def back_up(self, pool: Any, at: Sequence[torch.Tensor], io_backend: str = IO_BACKEND) -> None:
        def theirs(pool: Any, *_: Any) -> None:
            self.theirs.append((pool, None))
            self.when_theirs()

        hook = self._hook(pool, "backup_from_device_all_layer")
        hook(theirs, pool, None, *at, io_backend)

    def _hook(self, pool: Any, method: str) -> Callable[..., None]:
        kind = "mla" if pool.layout == "page_first_kv_split" else "mha"
        return self.copies.hooks[f"{CLASSES[kind]}.{method}"]

    def finish(self) -> None:
        """Wait until SGLang's stream has finished its work."""
        self.fake.wait_for(self.stream)

    def num_copies_of(self, *names: str) -> int:
        return sum(self.fake.count(name) for name in names)


def scramble(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with random bytes."""
    raw = tensor.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return tensor


def tokens(page_size: int, *pages: int) -> torch.Tensor:
    """Return the indices of the tokens of pages, as SGLang passes them."""
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor's bytes."""
    return tensor.contiguous().view(torch.uint8).clone()


def at_pages(pool: Any, host: Sequence[int], device: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return the indices of the tokens of pages in host memory, and of pages on the device."""
    return tokens(pool.page_size, *host), tokens(pool.page_size, *device)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings that a user would see."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
