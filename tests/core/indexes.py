"""The two indexes, for tests that both have to pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvtier import _hot
from kvtier.index import BlockIndex
from kvtier.index.native_index import NativeIndex
from kvtier.index.policies import LruPolicy
from kvtier.index.python_index import PythonIndex

INDEXES = ("native", "python")


def make(kind: str, tiers: Sequence[str]) -> BlockIndex:
    """An empty index with least recently used first; the test is skipped where it can't be had."""
    if kind == "python":
        return PythonIndex({tier: LruPolicy() for tier in tiers})
    if not _hot.NATIVE:
        pytest.skip(f"no native core: {_hot.NATIVE_REASON}")
    return NativeIndex(dict.fromkeys(tiers, "lru"))


class Both:
    """Calls the native index and its twin alike, and notices where they differ."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self.native, self.twin = make("native", tiers), make("python", tiers)

    def __len__(self) -> int:
        assert len(self.native) == len(self.twin)
        return len(self.native)

    def __getattr__(self, name: str) -> Any:
        native, twin = getattr(self.native, name), getattr(self.twin, name)
        if not callable(native):
            assert native == twin
            return native

        def call(*arguments: Any, **named: Any) -> Any:
            result, expected = native(*arguments, **named), twin(*arguments, **named)
            if isinstance(expected, np.ndarray):
                assert result.tolist() == expected.tolist()
            else:
                assert result == expected, f"{name} differs"
            return result

        return call
