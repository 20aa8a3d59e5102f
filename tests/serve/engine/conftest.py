"""Engines for the tests: small pools, the built-in model or random weights."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.core.config import CacheConfig
from kvtier.core.types import WritePolicy
from kvtier.serve.engine import Engine, EngineConfig, Tokenizer
from kvtier.serve.engine.model_names import BUILTIN

pytestmark = pytest.mark.engine

SMALL = EngineConfig(
    model="random-gqa",
    block_size=16,
    chunk_tokens=32,
    device_capacity="8MiB",
    max_queue=1000,
    threads=2,
    cache=CacheConfig(host_capacity="16MiB", strict=True),
)
"""84 KiB per 16 tokens: the device tier holds about 5,400 tokens."""


def changed(
    host: str | int | None = None, policy: WritePolicy | None = None, **changes: Any
) -> EngineConfig:
    """Return ``SMALL`` with other values."""
    cache = SMALL.cache
    if host is not None:
        cache = replace(cache, host_capacity=host)
    if policy is not None:
        cache = replace(cache, write_policy=policy)
    return replace(SMALL, cache=cache, **changes)


@pytest.fixture(scope="session")
def text() -> str:
    """Return real text: some modules of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return "".join((library / name).read_text() for name in ("argparse.py", "typing.py", "ast.py"))


@pytest.fixture(scope="session")
def prompt(text: str) -> list[int]:
    """Return 300 tokens. The models with random weights have the built-in one's tokenizer."""
    return Tokenizer(BUILTIN / "kvtier-tiny").encode(text)[:300]


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny() -> Iterator[Engine]:
    """Run the built-in model."""
    with Engine(replace(SMALL, model="kvtier-tiny", device_capacity="16MiB")) as made:
        yield made


@pytest.fixture
def make() -> Iterator[Callable[[EngineConfig], Engine]]:
    """Start engines that are closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda config: stack.enter_context(Engine(config))
