"""Devices over fake drivers, and memory for them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from kvtier.devices.ascend import AscendDevice
from kvtier.devices.base import Memory
from kvtier.devices.compute import ComputeStream
from kvtier.devices.cuda import CudaDevice
from kvtier.devices.driver_device import DriverDevice
from kvtier.devices.hip import HipDevice
from tests.kit.fakes.fake import VARIANTS, Fake

MAKERS = {"cuda": CudaDevice, "ascend": AscendDevice, "hip": HipDevice}
BATCH_CALLS = {
    "cuda": "cuMemcpyBatchAsync", "ascend": "aclrtMemcpyBatchAsync", "hip": "hipMemcpyBatchAsync",
}  # fmt: skip
REFUSALS = {"cuda": 801, "ascend": 207000, "hip": 801}
WITH_BATCH = [name for name in VARIANTS if name not in ("cuda122", "cann83", "hip70")]


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Environment variables, for a while."""
    with patch.dict("os.environ", variables):
        yield


def host_compute() -> None:
    """For compute on the CPU: nothing of it is ever under way when a copy is asked for."""


def make_device(
    fake: Fake,
    index: int = 0,
    compute_stream: ComputeStream = host_compute,
    variables: Mapping[str, str] | None = None,
) -> DriverDevice:
    """The product's device over ``fake``. variables: of the environment."""
    library = {f"KVTIER_{fake.vendor.upper()}_LIBRARY": str(fake.path)}
    with environment(**(library | dict(variables or {}))):
        return MAKERS[fake.vendor](f"any:{index}", compute_stream)


def page_locked(device: DriverDevice, nbytes: int) -> Memory:
    """Host memory in whole pages, page-locked."""
    arena = mmap.mmap(-1, nbytes)
    memory = Memory(np.frombuffer(arena, np.uint8).ctypes.data, nbytes, "host", arena)
    assert device.page_lock(memory)
    return memory
