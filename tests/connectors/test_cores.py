"""Cores for kvtier's threads, with real processes that are bound to some."""

import json
import os
import subprocess
import sys
from collections.abc import Collection
from threading import Thread

import pytest

from kvtier.cache.transfer.lane import Lane
from kvtier.connectors.vllm.shared.cores import off_compute_cores
from kvtier.core.errors import DeviceError

CORES = sorted(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core only")

RANK = """
import json, os
os.sched_setaffinity(0, {ours})
from tests.connectors.test_cores import cores_of_threads
print(json.dumps(cores_of_threads()))
"""

ENGINE = """
import subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, "-c", code], stdout=-1) for code in {bystanders!r}]
for rank in ranks:
    rank.stdout.readline()
subprocess.run([sys.executable, "-c", {rank!r}], check=True)
for rank in ranks:
    rank.kill()
    rank.wait()
"""


def cores_of_threads() -> list[list[int]]:
    """Return the cores of a lane's thread, and of the thread that starts it, before and after."""
    found = [_cores()]
    lane = Lane("copy", DeviceError)
    with off_compute_cores():
        lane.start()
        Thread(target=lambda: found.append(_cores())).start()

    def look(_: object) -> tuple[()]:
        found.append(_cores())
        return ()

    lane.submit(look, 0).wait()
    lane.close()
    return [*found, _cores()]


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def run(ours: Collection[int], *others: Collection[int]) -> list[list[int]]:
    """Return the cores that a rank finds. others: cores of the ranks beside it."""
    bystanders = [
        f"import os, time; os.sched_setaffinity(0, {set(other)}); print(flush=True); time.sleep(60)"
        for other in others
    ]
    program = ENGINE.format(bystanders=bystanders, rank=RANK.format(ours=set(ours)))
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    found: list[list[int]] = json.loads(done.stdout)
    return found


def test_threads_start_on_cores_that_nobody_computes_on() -> None:
    first, *rest = CORES
    assert run([first]) == [[first], rest, rest, [first]]


def test_cores_of_another_rank_are_not_spare() -> None:
    first, second, *rest = CORES
    spare = rest or [first]  # where none is spare, they stay
    assert run([first], [second]) == [[first], spare, spare, [first]]


def test_nothing_changes_where_no_process_is_bound() -> None:
    assert run(CORES) == [CORES] * 4
