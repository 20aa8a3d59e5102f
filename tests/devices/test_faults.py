"""Faults of a driver: no batch call, refusals, errors now and later, lost devices."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest

from kvtier.core.errors import ConfigError, DeviceError
from kvtier.devices import CopyBatch, Direction, Memory
from kvtier.devices.driver_device import DriverDevice
from kvtier.devices.paths import BATCH_VARIABLE
from kvtier.devices.rig import Rig, open_rig
from tests.devices.drivers import BATCH_CALLS, REFUSALS, WITH_BATCH, make_device, page_locked
from tests.kit.fakes.fake import VARIANTS, Fake

NEWEST = ["cuda130", "cann91", "hip713"]
SYNCHRONIZE = {
    "cuda": "cuEventSynchronize", "ascend": "aclrtSynchronizeEvent", "hip": "hipEventSynchronize",
}  # fmt: skip
REGISTER = {
    "cuda": "cuMemHostRegister_v2", "ascend": "aclrtHostRegisterV2", "hip": "hipHostRegister",
}  # fmt: skip
EACH = {"cuda": "cuMemcpyHtoDAsync_v2", "ascend": "aclrtMemcpyAsync", "hip": "hipMemcpyAsync"}
ROWS = {"cuda": "cuMemcpy2DAsync_v2", "ascend": "aclrtMemcpy2dAsync", "hip": "hipMemcpy2DAsync"}


@pytest.fixture
def fake(variant: str) -> Iterator[Fake]:
    fake = Fake(variant)
    fake.reset(seed=len(variant), late_reads=True, max_delay_us=50)
    yield fake
    assert fake.num_pending == 0
    assert fake.violations == []


@pytest.fixture
def device(fake: Fake) -> Iterator[DriverDevice]:
    device = make_device(fake)
    yield device
    device.close()


@pytest.fixture
def rig(device: DriverDevice) -> Iterator[Rig]:
    with open_rig(device, 1 << 20) as rig:
        yield rig


def _is_right(device: DriverDevice, rig: Rig, direction: Direction = Direction.LOAD) -> bool:
    return rig.brings_the_right_bytes(device.copy, device.copy, direction, 512, 256)


# -- without a batch call --------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_call_is_used_where_it_is_and_2d_copies_where_it_is_not(
    fake: Fake, device: DriverDevice, rig: Rig
) -> None:
    before = fake.count(ROWS[fake.vendor])
    assert _is_right(device, rig)
    has_batch = fake.variant in WITH_BATCH
    assert (fake.count(BATCH_CALLS[fake.vendor]) > 0) == has_batch
    assert (fake.count(ROWS[fake.vendor]) > before) == (not has_batch)
    (line,) = (finding for finding in device.findings() if finding.topic == "copy path")
    assert line.found == ("one batch call" if has_batch else "2-D and single copies")
    assert bool(line.note) == (not has_batch)


@pytest.mark.parametrize("variant", WITH_BATCH)
@pytest.mark.parametrize("direction", Direction)
def test_refused_batch_call_is_done_without_once_and_for_all(
    fake: Fake, device: DriverDevice, rig: Rig, direction: Direction,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    call = BATCH_CALLS[fake.vendor]
    caplog.set_level(logging.INFO, "kvtier")
    fake.fail_call(call, REFUSALS[fake.vendor])
    assert _is_right(device, rig, direction)
    assert _is_right(device, rig, direction)
    assert fake.count(call) == 1
    assert sum("without path=batch" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("variant", ["cann85", "cann91"])
def test_cann_that_has_the_call_and_can_not_do_it_is_done_without(
    fake: Fake, device: DriverDevice, rig: Rig
) -> None:
    fake.refuse_batches()
    assert _is_right(device, rig)
    assert fake.count("aclrtMemcpyBatchAsync") == 1


@pytest.mark.parametrize("variant", NEWEST)
@pytest.mark.parametrize("entry", [0, 1, 100, 255])
def test_first_batch_that_fails_half_way_is_done_again_by_other_means(
    fake: Fake, device: DriverDevice, rig: Rig, entry: int
) -> None:
    batch = rig.scattered(Direction.LOAD, 512, 256)
    fake.fail_entry(entry, REFUSALS[fake.vendor])
    device.copy(batch, Direction.LOAD)
    assert fake.num_pending == 0
    assert _is_right(device, rig)


@pytest.mark.parametrize("variant", NEWEST)
def test_later_batch_that_fails_is_an_error_and_leaves_nothing_behind(
    fake: Fake, device: DriverDevice, rig: Rig
) -> None:
    assert _is_right(device, rig)
    fake.fail_entry(40, code=1)
    with pytest.raises(DeviceError, match=r"Batch\w* answered 1 "):
        device.copy(rig.scattered(Direction.LOAD, 512, 256), Direction.LOAD)
    assert fake.num_pending == 0
    calls = fake.count(BATCH_CALLS[fake.vendor])
    assert _is_right(device, rig)
    assert fake.count(BATCH_CALLS[fake.vendor]) > calls, "one error is no refusal"


@pytest.mark.parametrize("variant", NEWEST)
def test_batch_call_can_be_switched_off(fake: Fake) -> None:
    device = make_device(fake, variables={BATCH_VARIABLE: "off"})
    with open_rig(device, 1 << 20) as rig:
        assert _is_right(device, rig)
    assert fake.count(BATCH_CALLS[fake.vendor]) == 0
    notes = [line.note for line in device.findings() if line.topic == "copy path"]
    assert notes == ["switched off by KVTIER_BATCH_COPY=off in the environment"]
    device.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_call_that_has_to_be_is_not_done_without(fake: Fake) -> None:
    if fake.variant not in WITH_BATCH:
        with pytest.raises(DeviceError, match="KVTIER_BATCH_COPY=on in the environment, but"):
            make_device(fake, variables={BATCH_VARIABLE: "on"})
        return
    device = make_device(fake, variables={BATCH_VARIABLE: "on"})
    with open_rig(device, 1 << 20) as rig:
        fake.fail_call(BATCH_CALLS[fake.vendor], REFUSALS[fake.vendor])
        with pytest.raises(DeviceError, match=str(REFUSALS[fake.vendor])):
            device.copy(rig.scattered(Direction.LOAD, 512, 256), Direction.LOAD)
    device.close()


@pytest.mark.parametrize("variant", NEWEST)
def test_switch_that_is_no_switch_is_refused(fake: Fake) -> None:
    with pytest.raises(ConfigError, match="KVTIER_BATCH_COPY='maybe'.*use auto, on or off"):
        make_device(fake, variables={BATCH_VARIABLE: "maybe"})


@pytest.mark.parametrize("variant", WITH_BATCH)
def test_batches_are_capped_and_have_no_empty_copies(fake: Fake, device: DriverDevice) -> None:
    count = 2 * device.driver.max_copies + 5
    with open_rig(device, 1 << 20) as rig:
        batch = rig.scattered(Direction.LOAD, 16, count - count % 32)
        size = batch.size.copy()
        size[::7] = 0
        cut = CopyBatch(batch.src, batch.dst, batch.src_offset, batch.dst_offset, size)
        device.copy(cut, Direction.LOAD)
    assert fake.count(BATCH_CALLS[fake.vendor]) == 2
    assert fake.count("copies") == np.count_nonzero(size)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", NEWEST)
@pytest.mark.parametrize("way", ["batch", "rows", "each"])
def test_error_that_comes_late_is_reported_and_nothing_is_in_flight(
    fake: Fake, device: DriverDevice, rig: Rig, way: str
) -> None:
    fake.fail_late(code=700, nth_copy=17)
    with pytest.raises(DeviceError, match="700"):
        device.ways()[way](rig.scattered(Direction.STORE, 512, 256), Direction.STORE)
    assert fake.num_pending == 0


@pytest.mark.parametrize("variant", ["cuda122", "cann83", "hip70"])
@pytest.mark.parametrize("nth", [1, 5])
def test_single_copy_that_is_refused_is_an_error_and_others_go_on(
    fake: Fake, device: DriverDevice, rig: Rig, nth: int
) -> None:
    call = ROWS[fake.vendor]
    fake.fail_call(call, 1, nth=nth)
    with pytest.raises(DeviceError, match=f"{call} answered 1"):
        device.copy(rig.scattered(Direction.LOAD, 512, 256), Direction.LOAD)
    assert fake.num_pending == 0
    fake.fail_call(EACH[fake.vendor], 1)
    with pytest.raises(DeviceError, match=f"{EACH[fake.vendor]} answered 1"):
        device.ways()["each"](rig.scattered(Direction.LOAD, 512, 256), Direction.LOAD)
    assert _is_right(device, rig)


@pytest.mark.parametrize("variant", NEWEST)
def test_lost_device_is_an_error_every_time_and_hangs_nobody(fake: Fake) -> None:
    device = make_device(fake)
    arena = page_locked(device, 1 << 16)
    pool = Memory(fake.allocate(1 << 16), 1 << 16, "fake", None)
    start, size = np.zeros(1, np.int64), np.array([1 << 16], np.int64)
    fake.lose_device(719)
    for _ in range(2):
        with pytest.raises(DeviceError, match="719"):
            device.copy(CopyBatch(arena, pool, start, start, size), Direction.LOAD)
    assert device.page_lock(Memory(1 << 40, 4096, "host", None)) is False
    device.unlock(arena)  # the host tier is closed all the same
    device.close()


@pytest.mark.parametrize("variant", NEWEST)
def test_wait_that_times_out_is_an_error(fake: Fake, device: DriverDevice, rig: Rig) -> None:
    fake.fail_call(SYNCHRONIZE[fake.vendor], 702)
    with pytest.raises(DeviceError, match="702"):
        device.copy(rig.scattered(Direction.LOAD, 512, 256), Direction.LOAD)
    assert fake.num_pending == 0, "the memories may be used again"


@pytest.mark.parametrize("variant", NEWEST)
def test_copies_run_on_any_thread(fake: Fake, device: DriverDevice, rig: Rig) -> None:
    right: list[bool] = []
    for _ in range(3):
        thread = Thread(target=lambda: right.append(_is_right(device, rig)))
        thread.start()
        thread.join()
    assert right == [True] * 3


# -- page-locking ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", NEWEST)
@pytest.mark.parametrize("nth", [1, 3])
def test_refused_page_locking_is_undone_and_copies_work_without(
    fake: Fake, device: DriverDevice, nth: int
) -> None:
    device.driver.max_lock_bytes = 1 << 14
    fake.fail_call(REGISTER[fake.vendor], 2, nth=nth)
    with open_rig(device, 1 << 16) as rig:
        assert not rig.is_locked
        assert not [leak for leak in fake.leaks if "registration" in leak]
        assert rig.brings_the_right_bytes(device.copy, device.copy, Direction.LOAD, 512, 32)
    assert fake.count("synchronous_copies") > 0
    if fake.vendor == "hip":
        assert fake.library.fake_pending_error() == 0, "torch would report it as its own"


@pytest.mark.parametrize("variant", NEWEST)
def test_copies_are_cut_where_two_locked_pieces_meet(fake: Fake, device: DriverDevice) -> None:
    device.driver.max_lock_bytes = 1 << 14  # locked in 16 pieces; copies of 5,000 bytes cross them
    with open_rig(device, 1 << 18) as rig:
        assert rig.is_locked
        assert fake.count(REGISTER[fake.vendor]) == 16
        for direction in Direction:
            assert rig.brings_the_right_bytes(device.copy, device.copy, direction, 5000, 26)
    assert fake.count("synchronous_copies") == 0


@pytest.mark.parametrize("variant", ["cann83"])
def test_old_cann_page_locks_by_its_old_call(fake: Fake, rig: Rig) -> None:
    assert rig.is_locked
    assert fake.count("aclrtHostRegister") == 1


@pytest.mark.parametrize("variant", NEWEST)
def test_memory_that_begins_within_a_page_is_not_locked(device: DriverDevice) -> None:
    assert not device.page_lock(Memory(4096 + 8, 4096, "host", None))


# -- the machine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", NEWEST)
def test_device_that_is_not_there_is_refused(fake: Fake) -> None:
    with pytest.raises(DeviceError):
        make_device(fake, index=7)


@pytest.mark.parametrize("variant", NEWEST)
def test_second_device_copies_with_its_own_memory(fake: Fake) -> None:
    device = make_device(fake, index=1)
    with open_rig(device, 1 << 20) as rig:
        assert _is_right(device, rig)
    device.close()


@pytest.mark.parametrize("variant", ["cuda130"])
def test_library_without_a_needed_call_is_refused_by_name(fake: Fake) -> None:
    wrong = Fake("hip713")
    with pytest.raises(DeviceError, match=r"has no cuInit.*KVTIER_CUDA_LIBRARY"):
        make_device(fake, variables={"KVTIER_CUDA_LIBRARY": str(wrong.path)})


# -- a forked child --------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", NEWEST)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_gives_nothing_back(device: DriverDevice) -> None:
    fence = device.queue(Direction.LOAD).fence()
    child = os.fork()
    if child == 0:
        driver_type: Any = type(device.driver)
        driver_type.use = lambda driver: os._exit(1)  # before every other call
        del fence
        device.close()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    fence.wait()
