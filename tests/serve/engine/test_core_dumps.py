"""Core dumps exclude the embedded engine's KV."""

from __future__ import annotations

import sys

import pytest
import torch

from kvtier.layout import DType, full_attention
from kvtier.serve.engine.pool import KVPool
from tests.kit.smaps import is_dumped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="VmFlags is of Linux")


def test_pool_on_a_cpu_is_left_out() -> None:
    group = full_attention(2, 2, 24, DType.FLOAT32, 16)
    # More than 32 MiB get a mapping of their own: less may come from the heap, whose last user
    # may have set the flag.
    pool = KVPool(group, 3000, torch.device("cpu"), torch.float32)
    assert not is_dumped(pool.memory.address, pool.memory.nbytes)
