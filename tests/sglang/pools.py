"""SGLang's own host pools on the CPU, small, with bytes that can be told apart."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

NUM_PAGES = 12
PAGE = 16
LAYERS, HEADS, DIM = 3, 2, 8
