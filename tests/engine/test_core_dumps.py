"""Core dumps leave out the embedded engine's KV."""

from __future__ import annotations

import sys

import pytest
import torch

from kvtier.engine.pool import KVPool
from kvtier.layout import DType, full_attention
from tests.smaps import is_dumped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="VmFlags is of Linux")


def test_pool_on_a_cpu_is_left_out() -> None:
    group = full_attention(2, 2, 24, DType.FLOAT32, 16)
    pool = KVPool(group, 5, torch.device("cpu"), torch.float32)
    assert not is_dumped(pool.memory.address, pool.memory.nbytes)
