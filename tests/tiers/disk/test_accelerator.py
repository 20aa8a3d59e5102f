"""Blocks between a slab and an accelerator's memory: their path, and their bytes.

Every test also fails if a fake saw a call that hardware might punish, or a resource that was not
released.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.errors import ConfigError, DeviceError
from kvtier.core.types import Direct, Verify
from kvtier.layout.named import ORDERS
from kvtier.tiers import Outcome, Pieces
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.disk.arrays import Int64s
from kvtier.tiers.disk.io import probe as probing
from tests.kit.effort import effort
from tests.kit.fakes.storage import LIBRARIES, Fault
from tests.tiers.disk.accelerated import (
    BY_LAYER,
    GQA,
    MLA,
    NUM_BLOCKS,
    ODD,
    PAGE,
    THERE,
    Accelerated,
    accelerated,
    keys,
    line_of,
    names,
    on_disk,
)

GROUPS = {"GQA": GQA, "MLA": MLA, "odd": ODD}
BATCHES = ["cufile113", "cufile115"]


@pytest.fixture(params=LIBRARIES)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Accelerated]:
    with accelerated(request.param, tmp_path, cuts=BY_LAYER) as made:
        yield made


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discard results of earlier probes."""
    monkeypatch.setattr(probing, "_known", {})


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIBRARIES)
@settings(max_examples=max(10, settings().max_examples // 3))
@given(
    group=st.sampled_from(sorted(GROUPS)),
    order=st.sampled_from(sorted(ORDERS)),
    cuts=st.sets(st.integers(1, 119), max_size=6),
    verify=st.sampled_from(Verify),
    has_host=st.booleans(),
    crashed=st.booleans(),
    percent_short=st.sampled_from([0, 40]),
    slots=st.permutations(range(NUM_BLOCKS + 2)),
    at=st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, unique=True),
    seed=st.integers(0, 2**32 - 1),
)
def test_blocks_come_as_repack_would_bring_them(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    group: str,
    order: str,
    cuts: set[int],
    verify: Verify,
    has_host: bool,
    crashed: bool,
    percent_short: int,
    slots: list[int],
    at: list[int],
    seed: int,
) -> None:
    """For any layout, place and trust, wherever memory is cut; no other byte changes.

    A cut may be in the middle of a piece: that block is not transferred directly.
    """
    folder = tmp_path_factory.mktemp("slab")
    num_pages = (NUM_BLOCKS + 2) * GROUPS[group].bytes_per_block // PAGE
    options: Any = {"group": GROUPS[group], "order": order, "has_host": has_host}
    options["cuts"] = {cut for cut in cuts if cut < num_pages}
    with accelerated(name, folder, **options) as harness:
        harness.fake.reset_storage(seed, 20 * (seed % 3), percent_short)
        tier = harness.stored(verify=verify, sample_every=2)
        if crashed:
            tier.abandon()
            tier = harness.open(verify=verify, sample_every=2)
        if harness.pool.memory.kind not in tier.facts.reaches:
            assert has_host, "without a host tier everything is reached"
            return
        for _ in range(2):
            before = np.random.default_rng(seed).integers(
                0, 256, harness.pool.memory.nbytes, np.uint8
            )
            harness.fill_pool(before)
            to = slots[: len(at)]
            got = tier.get([keys()[each] for each in at], harness.in_pool(to), 60)
            assert got == [Outcome.THERE] * len(at)
            assert np.array_equal(harness.pool_bytes(), harness.expected(before, to, at))


def test_several_disks_register_the_pool_once(harness: Accelerated, tmp_path: Path) -> None:
    tier = harness.stored(more_paths=(tmp_path / "two",), direct=Direct.ON)
    assert tier.get(keys(), harness.in_pool(), 60) == THERE
    harness.check_pool()
    assert harness.num_calls("HandleRegister") == 2
    is_registered = harness.fake.vendor != "ascend"
    assert harness.num_calls("BufRegister") == is_registered * len(harness.allocations)


def test_places_that_can_not_be_reached_straight_are_copied_to(harness: Accelerated) -> None:
    """Pieces that begin inside a page, or in memory that the library has not registered."""
    tier = harness.stored()
    others = harness.fake.allocate(GQA.bytes_per_block)
    pieces = harness.in_pool()
    addresses = pieces.addresses.copy()
    begins = np.cumsum(pieces.sizes) - pieces.sizes
    addresses[0] = others + begins.astype(np.uint64)
    addresses[1] = addresses[1] + np.uint64(512)
    moved = Pieces(addresses[:2], pieces.sizes, pieces.kind)
    assert tier.get(keys(2), moved, 60) == THERE[:2]
    size = GQA.bytes_per_block
    assert np.array_equal(harness.fake.peek(others, size), harness.content[:size])
    found = [
        harness.fake.peek(int(at), int(n)) for at, n in zip(addresses[1], pieces.sizes, strict=True)
    ]
    assert np.array_equal(np.concatenate(found), harness.content[size : 2 * size])
    harness.fake.free(others)


# -- trust -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "crashed"])
def test_blocks_go_straight_once_they_are_trusted(harness: Accelerated, is_closed: bool) -> None:
    """After a crash the processor sees every block first; after an orderly end it need not."""
    tier = harness.stored()
    tier.close() if is_closed else tier.abandon()
    tier = harness.open()
    for turn in range(2):
        harness.fill_pool(0)
        assert tier.get(keys(), harness.in_pool(), 60) == THERE
        harness.check_pool()
        assert (harness.fake.num_transfers > 0) == (is_closed or turn > 0)


def test_a_sample_takes_the_way_on_which_it_is_verified(harness: Accelerated) -> None:
    tier = harness.stored(verify=Verify.SAMPLED, sample_every=3)
    copies = harness.fake.count("copies")
    assert tier.get(keys(), harness.in_pool(), 60) == THERE
    assert harness.fake.count("copies") - copies == 2 * 8, "two of six blocks, in 8 pieces each"


@pytest.mark.parametrize("is_sampled", [True, False], ids=["sampled", "after a crash"])
def test_damage_is_noticed_wherever_it_is_looked_for(
    harness: Accelerated, is_sampled: bool
) -> None:
    tier = harness.stored(verify=Verify.SAMPLED, sample_every=1 if is_sampled else 1000)
    value = int(harness.content[2 * GQA.bytes_per_block + 100])
    on_disk(tier, harness.folder, block=2, at=100, value=value ^ 1)
    if not is_sampled:
        tier.abandon()
        tier = harness.open()
    outcomes = tier.get(keys(), harness.in_pool(), 60)
    assert outcomes == [Outcome.DAMAGED if at == 2 else Outcome.THERE for at in range(NUM_BLOCKS)]


# -- on, auto and off ------------------------------------------------------------------------------


def test_every_block_is_verified_only_by_way_of_host_memory(harness: Accelerated) -> None:
    with pytest.raises(ConfigError, match="verify: always, and the device computes no checksums"):
        harness.open(verify=Verify.ALWAYS, direct=Direct.ON)
    tier = harness.stored(verify=Verify.ALWAYS)
    assert tier.get(keys(), harness.in_pool(), 60) == THERE
    harness.check_pool()
    assert harness.fake.num_transfers == 0
    line = line_of(tier, "disk to device")
    assert line.found == "through a buffer"
    assert line.note == "verify is always, and the device computes no checksums"


def test_off_reaches_host_memory_only(harness: Accelerated) -> None:
    tier = harness.open(direct=Direct.OFF)
    assert tier.facts.reaches == {"host"}
    assert tier.facts.direct is Direct.OFF
    assert line_of(tier, "disk to device").found == "through host memory"
    assert harness.fake.storage_leaks == [], "no driver was opened"


@pytest.mark.parametrize("name", LIBRARIES)
def test_beside_a_host_tier_auto_goes_straight_at_need(name: str, tmp_path: Path) -> None:
    with accelerated(name, tmp_path, has_host=True) as harness:
        tier = harness.stored()
        assert tier.facts.direct is Direct.AUTO
        assert harness.pool.memory.kind in tier.facts.reaches
        line = line_of(tier, "disk to device")
        assert (line.found, line.note) == (
            "through host memory",
            "direct while host memory is full",
        )
        harness.fill_pool(0)
        assert tier.get(keys(), harness.in_pool(), 60) == THERE
        harness.check_pool()
        assert tier.get(keys(), harness.in_host(), 60) == THERE, "and host memory as ever"


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("KVTIER_FAKE_DRIVER", "absent", "answered 5033"),
        ("KVTIER_FAKE_DRIVER", "abort", "ended by signal 6"),
        ("KVTIER_FAKE_BYTES", "wrong", "it brought wrong bytes"),
        ("KVTIER_FAKE_DRIVER", "spin", "it did not answer within 1.5 s, and was killed"),
    ],
    ids=["absent", "abort", "wrong bytes", "spin"],
)
def test_what_the_probe_could_not_do_is_not_done(
    variable: str, value: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value == "spin":
        probe = probing.probe
        monkeypatch.setattr(
            probing, "probe", lambda kind, folder, device: probe(kind, folder, device, 1.5)
        )
    with accelerated("cufile120", tmp_path) as harness:
        with monkeypatch.context() as broken:
            broken.setenv(variable, value)
            with pytest.raises(ConfigError, match=f"direct: on, and .*: .*{reason}.*leave it at"):
                harness.open(direct=Direct.ON)
            tier = harness.stored()
        assert line_of(tier, "disk to device").found == "through a buffer"
        assert reason in line_of(tier, "disk to device").note
        assert line_of(tier, "disk to accelerator").found == "no"
        harness.fill_pool(0)
        assert tier.get(keys(), harness.in_pool(), 60) == THERE
        harness.check_pool()
        assert harness.fake.num_transfers == 0


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("name", ["cufile113", "hipfile03"])
def test_compatibility_mode_is_called_what_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvtier")
    monkeypatch.setenv("KVTIER_FAKE_DRIVER", "bounced")
    with accelerated(name, tmp_path) as harness:
        tier = harness.stored()
        assert tier.facts.direct is Direct.OFF
        assert "only its compatibility mode" in line_of(tier, "disk to device").note
        assert line_of(tier, "disk to accelerator").found.startswith("compatibility mode: ")
        tier.close()
        tier = harness.open(direct=Direct.ON)
        line = line_of(tier, "disk to device")
        assert line.found == "direct, in compatibility mode"
        assert "every byte goes through host memory" in line_of(tier, "disk to accelerator").note
        harness.fill_pool(0)
        assert tier.get(keys(), harness.in_pool(), 60) == THERE
        harness.check_pool()
        assert harness.fake.num_transfers > 0
    warned = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
    assert any("way=direct, in compatibility mode" in each for each in warned)


def test_where_the_machine_is_direct_compatibility_mode_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe found a direct path. A later fallback of the library must be reported."""
    with accelerated("cufile120", tmp_path) as harness:
        harness.open().close()
        harness.fake.reset_storage(is_bounced=True)
        tier = harness.open()
        assert "kernel driver is not loaded" in line_of(tier, "disk to device").note
        with pytest.raises(ConfigError, match="kernel driver is not loaded"):
            harness.open(direct=Direct.ON, path=tmp_path / "two")
        assert "CUFILE_ALLOW_COMPAT_MODE" not in os.environ


@pytest.mark.parametrize("name", ["cufile120", "hipfile03"])
def test_a_pool_that_can_not_be_pinned_is_told_of(name: str, tmp_path: Path) -> None:
    with accelerated(name, tmp_path) as harness:
        harness.fake.limit_pinned(16)
        harness.fake.fail_call(f"{harness.prefix}DriverSetMaxPinnedMemSize", 5002)
        tier = harness.stored()
        assert "can't be pinned" in line_of(tier, "disk to device").note
        assert tier.get(keys(), harness.in_pool(), 60) == THERE


def test_a_device_without_a_library_or_a_queue_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with accelerated("cufile120", tmp_path) as harness:
        monkeypatch.setattr(harness.device, "file_library", "")
        tier = harness.open()
        assert "no file library is known" in line_of(tier, "disk to device").note
        tier.close()

        def refuse(direction: object) -> None:
            raise DeviceError("no more queues")

        monkeypatch.setattr(harness.device, "make_queue", refuse)
        tier = harness.open()
        assert tier.facts.reaches == {"host", "cpu"}
        assert line_of(tier, "disk to device").note == "no more queues"


# -- what a library may do to us -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "value"),
    [
        (Fault.ERROR, errno.EIO), (Fault.ERROR, 5014), (Fault.ERROR, errno.ENOSPC),
        (Fault.MUCH, 0), (Fault.CUT, 0), (Fault.CUT, 100), (Fault.CUT, PAGE),
    ],
)  # fmt: skip
def test_what_the_library_fails_at_is_read_by_way_of_host_memory(
    harness: Accelerated, fault: Fault, value: int
) -> None:
    """The disk need not be at fault: no slot is quarantined, and no block is dropped."""
    tier = harness.stored()
    for nth in (1, 2):
        harness.fill_pool(0)
        harness.fake.fail_transfer(fault, value, nth)
        assert tier.get(keys(), harness.in_pool(), 60) == THERE
        harness.check_pool()
    assert tier.blocks.slots.num_quarantined == 0


def test_a_library_that_fails_again_and_again_is_left_alone_for_a_while(
    harness: Accelerated, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = harness.stored(errors_until_off=2)
    accelerator = tier.blocks.parts[0].accelerator
    assert accelerator is not None

    def fail(offsets: Int64s, addresses: object, sizes: object, deadline_s: object) -> Int64s:
        return np.full(len(offsets), -errno.EIO)

    with monkeypatch.context() as broken:
        broken.setattr(accelerator.engine, "read", fail)
        for _ in range(2):
            assert line_of_straight(tier) == ""
            assert tier.get(keys(1), harness.in_pool([0]), 60) == THERE[:1]
    assert "2 read errors in a row, the last: EIO" in line_of_straight(tier)
    harness.fill_pool(0)
    assert tier.get(keys(), harness.in_pool(), 60) == THERE
    harness.check_pool()
    assert harness.fake.num_transfers == 0
    harness.now += 10.0
    assert tier.get(keys(), harness.in_pool(), 60) == THERE
    assert harness.fake.num_transfers > 0
    assert line_of_straight(tier) == ""


def line_of_straight(tier: DiskTier) -> str:
    """Return the reason why blocks are not transferred directly now."""
    lines = [line.note for line in tier.findings() if line.topic == "direct reads"]
    return lines[0] if lines else ""


def test_a_disk_that_fails_costs_its_blocks_by_either_way(harness: Accelerated) -> None:
    """The file ends before the last block."""
    tier = harness.stored()
    size = tier.blocks.parts[0].slot_bytes
    os.truncate(harness.folder / "data.slab", (NUM_BLOCKS - 1) * size)
    outcomes = tier.get(keys(), harness.in_pool(), 60)
    assert sorted(outcome.value for outcome in outcomes) == [
        "damaged",
        *["there"] * (NUM_BLOCKS - 1),
    ]


def test_a_copy_that_fails_is_not_called_there(harness: Accelerated) -> None:
    tier = harness.stored()
    tier.abandon()
    tier = harness.open()
    harness.fake.fail_late(code=719 if harness.fake.vendor != "ascend" else 507013)
    assert tier.get(keys(), harness.in_pool(), 60) == [Outcome.FAILED] * NUM_BLOCKS
    assert tier.blocks.slots.num_quarantined == 0


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_is_late_is_called_off_and_nothing_comes_later(
    name: str, tmp_path: Path
) -> None:
    with accelerated(name, tmp_path) as harness:
        tier = harness.stored()
        harness.fake.hold_storage()
        assert tier.get(keys(), harness.in_pool(), 0.05) == [Outcome.FAILED] * NUM_BLOCKS
        assert harness.fake.num_moving == 0
        harness.fake.let_storage_go()
        assert not harness.pool_bytes().any()
        assert tier.get(keys(), harness.in_pool(), 60) == THERE
        harness.check_pool()
        assert tier.blocks.slots.num_quarantined == 0


# -- nothing is left behind ------------------------------------------------------------------------


def test_a_thousand_operations_leave_nothing_behind(harness: Accelerated) -> None:
    """Some of the operations fail or have no time left."""
    tier = harness.stored(verify=Verify.SAMPLED, sample_every=5, errors_until_off=1000)
    held: list[tuple[int, int, int]] = []
    for each in range(effort(1000, 100)):
        if each % 7 == 1:
            harness.fake.fail_transfer(Fault.ERROR, errno.EIO)
        elif each % 7 == 3:
            harness.fake.fail_transfer(Fault.CUT, PAGE)
        some = keys()[each % NUM_BLOCKS : each % NUM_BLOCKS + 2]
        timeout_s = 0.0 if each % 7 == 5 else 60
        outcomes = tier.get(some, harness.in_pool(range(len(some))), timeout_s)
        assert set(outcomes) == ({Outcome.FAILED} if each % 7 == 5 else {Outcome.THERE})
        if each % 50 == 49:
            fds = len(os.listdir("/proc/self/fd"))
            held.append((fds, threading.active_count(), len(harness.fake.leaks)))
    assert len(set(held)) == 1, "descriptors, threads; streams, events and registrations"
    tier.check_invariants()


def test_opening_and_closing_leaves_nothing_behind(
    harness: Accelerated, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.open().close()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for turn in range(20):
        tier = harness.open(direct=Direct.ON)
        tier.put(names(), harness.in_host(), 60)
        assert tier.get(keys(), harness.in_pool(), 60) == THERE
        if turn % 2:
            tier.abandon()
        tier.close()
        assert harness.fake.storage_leaks == []
    with monkeypatch.context() as broken:
        broken.setattr("kvtier.tiers.disk.part.BlockPort", None)
        with pytest.raises(TypeError):
            harness.open(direct=Direct.ON)
    assert harness.fake.storage_leaks == []
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
