"""Real servers over disks that corrupt, fail, hang or belong to others, and a kill during stores.

Requests are answered, and never from wrong KV.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

import requests

from kvtier.tiers.disk.format.records import RecordKind, Records
from kvtier.tiers.disk.inspect.report import read_content
from tests.engines.sglang.servers import (
    FRONTS,
    PAGE,
    Answer,
    Server,
    linker,
    prompt,
    server,
    storage,
)

NUM_PAGES = 3
SHORT = NUM_PAGES * PAGE + 10
NUM_PROMPTS = 20
LONG_PAGES = 20
CLOSE = 1e-4
"""Difference between log-probabilities that were computed in other pieces."""


def _blocks(folder: Path) -> Records:
    """Return the records of all pages that the only slab has acknowledged."""
    (journal,) = folder.rglob("journal")
    table = read_content(journal.parent).table
    return table[table["kind"] == RecordKind.PUT]


def _same(answer: Answer, device: Answer) -> None:
    """Check for the same tokens, with about the same probabilities."""
    assert answer.tokens == device.tokens
    for got, wanted in zip(answer.logprobs[0], device.logprobs[0], strict=True):
        assert abs(got[0] - wanted[0]) < CLOSE


def _warm(running: Server, prompts: Sequence[list[int]]) -> list[Answer]:
    """Return each prompt's answer when the device has all of it."""
    warm = []
    for each in prompts:
        running.ask(each)
        warm.append(running.ask(each))
    return warm


def _damage(folder: Path) -> None:
    """Damage the second page of each short prompt: another prompt's bytes, or one bit, in turn."""
    blocks = _blocks(folder)
    second = np.sort(blocks["slot"][blocks["depth"] == 1])[:NUM_PROMPTS]
    (data,) = folder.rglob("data.slab")
    slot_bytes = _slot_bytes(folder)
    with data.open("r+b") as file:

        def read(slot: int) -> bytes:
            file.seek(slot * slot_bytes)
            return file.read(slot_bytes)

        swapped = second[::2]
        contents = [read(int(slot)) for slot in swapped]
        for slot, content in zip(swapped, contents[1:] + contents[:1], strict=True):
            file.seek(int(slot) * slot_bytes)
            file.write(content)
        for at, slot in enumerate(second[1::2]):
            damaged = bytearray(read(int(slot)))
            damaged[1000 * at] ^= 1 << at % 8
            file.seek(int(slot) * slot_bytes)
            file.write(damaged)


def _slot_bytes(folder: Path) -> int:
    from kvtier.tiers.disk.opening import read_superblock

    (slab,) = folder.iterdir()
    return read_superblock(slab)[0].slot_bytes


def _store_until_killed(running: Server, folder: Path, num_before: int) -> None:
    """Send prompts, and kill the server when it has acknowledged a part of their blocks."""

    def ask() -> None:
        for seed in range(100, 110):
            try:
                running.ask(prompt(seed, LONG_PAGES * PAGE + 10))
            except requests.RequestException:
                return

    asking = threading.Thread(target=ask)
    asking.start()
    running.settle(folder, num_before + LONG_PAGES // 2)
    running.kill()
    asking.join()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", FRONTS)
def test_killed_and_damaged(tmp_path: Path, kind: str) -> None:
    folder, log, options = tmp_path / "slab", tmp_path / "log", FRONTS[kind](tmp_path / "slab")
    prompts = [prompt(seed, SHORT) for seed in range(NUM_PROMPTS)]
    with server(log, *options) as first:
        warm = _warm(first, prompts)
        num_short = NUM_PROMPTS * NUM_PAGES
        first.settle(folder, num_short)
        _store_until_killed(first, folder, num_short)
    num_acknowledged = len(_blocks(folder)) - num_short
    assert num_acknowledged >= LONG_PAGES // 2
    _damage(folder)
    with server(log, *options) as second:
        again = [second.ask(each) for each in prompts]
        killed = [second.ask(prompt(seed, LONG_PAGES * PAGE + 10)) for seed in range(100, 110)]
    assert [each.num_cached for each in warm] == [NUM_PAGES * PAGE] * NUM_PROMPTS
    assert [each.num_cached for each in again] == [PAGE] * NUM_PROMPTS  # 20 of 20 noticed
    for answer, device in zip(again, warm, strict=True):
        _same(answer, device)
    assert sum(each.num_cached for each in killed) == num_acknowledged * PAGE


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", ["reads fail", "writes fail", "reads hang"])
def test_disk_that_does_not_do_what_it_should(tmp_path: Path, fault: str) -> None:
    folder, log = tmp_path / "slab", tmp_path / "log"
    prompts = [prompt(seed, SHORT) for seed in range(6)]
    waits = "timeout" if fault == "reads hang" else "wait_complete"
    with server(log, *storage(folder, waits=waits), KVTIER_TEST_DISK=fault) as running:
        warm = _warm(running, prompts)
        if fault != "writes fail":
            running.settle(folder, len(prompts) * NUM_PAGES)
        running.flush()
        began = time.monotonic()
        again = [running.ask(each) for each in prompts]
        took_s = time.monotonic() - began
    assert [each.num_stored for each in again] == [0] * len(prompts)
    for answer, device in zip(again, warm, strict=True):
        _same(answer, device)
    assert took_s < 90, "requests waited for the disk one after another"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", ["reads fail", "writes fail", "reads hang"])
def test_linker_over_such_a_disk(tmp_path: Path, fault: str) -> None:
    """Earlier writes are not found; requests wait no longer than computing takes."""
    folder, log = tmp_path / "slab", tmp_path / "log"
    prompts = [prompt(seed, SHORT) for seed in range(6)]
    broken: Any = {"KVTIER_TEST_DISK": fault}
    with server(log, *linker(folder), **(broken if fault == "writes fail" else {})) as first:
        warm = _warm(first, prompts)
        if fault != "writes fail":
            first.settle(folder, len(prompts) * NUM_PAGES)
        first.flush()
        flushed = [first.ask(each) for each in prompts]
        first.kill()
    with server(log, *linker(folder), **broken) as second:
        began = time.monotonic()
        again = [second.ask(each) for each in prompts]
        took_s = time.monotonic() - began
    for device, in_host, recomputed in zip(warm, flushed, again, strict=True):
        assert (in_host.num_cached, recomputed.num_cached) == (NUM_PAGES * PAGE, 0)
        _same(in_host, device)
        _same(recomputed, device)
    assert took_s < 90, "requests waited for the disk one after another"
