"""Steps without transfers, with vLLM's real scheduler and both halves of the connector."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)

from benchmarks.vllm.steps import PAGE, Replica, prepare
from kvtier.cache.local import LocalBlockCache
from kvtier.connectors.vllm.kv_connector.connector import IDLE, StepMetadata
from kvtier.connectors.vllm.kv_connector.messages import StepMessage
from kvtier.connectors.vllm.kv_connector.scheduler import SchedulerHalf
from kvtier.connectors.vllm.offloading.connector import NOTHING, TierMetadata
from kvtier.connectors.vllm.shared.manager import TierManager
from kvtier.connectors.vllm.shared.step import DueRequests
from tests.engines.vllm.engines import Connects, connector, own_connector

NUM_RUNNING = 8


@contextmanager
def running(connects: Connects = connector) -> Iterator[Replica]:
    prepare()
    made = Replica(connects(host_capacity="64MiB", offload_prompt_only=False), NUM_RUNNING)
    made.settle()
    yield made
    made.close()


def _stored(replica: Replica, monkeypatch: pytest.MonkeyPatch, *, is_reduced: bool) -> list[bytes]:
    """Run requests that come and go. Return the keys of all blocks that were stored."""
    stored: list[bytes] = []
    end_stores = TierManager.end_stores

    def noted(self: TierManager, ended: Any) -> None:
        ended = list(ended)
        for keys, *_ in ended:
            stored.extend(keys)
        end_stores(self, ended)

    with monkeypatch.context() as patch:
        patch.setattr(TierManager, "end_stores", noted)
        if not is_reduced:
            patch.setattr(DueRequests, "find", lambda self, output: {*output.num_scheduled_tokens})
        rng = random.Random(1)
        for _ in range(3):
            for _ in range(3):
                replica.begin(rng.randrange(3, 70))
                for _ in range(rng.randrange(1, 3 * PAGE)):
                    replica.step()
            replica.end()
    return stored


def test_as_many_blocks_are_stored_as_when_every_request_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, connects: Connects
) -> None:
    found = []
    for is_reduced in (False, True):
        with running(connects) as replica:
            found.append(_stored(replica, monkeypatch, is_reduced=is_reduced))
    assert len(found[0]) > 30
    assert sorted(found[0]) == sorted(found[1])


def test_stores_that_end_in_one_step_are_committed_by_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits: list[list[int]] = []  # by report of the ranks: the blocks of each call
    commit, hear = LocalBlockCache.commit, SchedulerHalf.hear

    def noted(self: LocalBlockCache, keys: Any, *more: Any, **named: Any) -> None:
        commits[-1].append(len(keys))
        commit(self, keys, *more, **named)

    def heard(self: SchedulerHalf, message: Any) -> None:
        commits.append([])
        hear(self, message)

    monkeypatch.setattr(LocalBlockCache, "commit", noted)
    monkeypatch.setattr(SchedulerHalf, "hear", heard)
    with running(own_connector) as replica:
        replica.begin(*[2 * PAGE + 2] * NUM_RUNNING)
        for _ in range(PAGE):
            replica.step()
        replica.settle()
        replica.end()
    assert sum(map(sum, commits)) >= 2 * NUM_RUNNING
    assert max(map(sum, commits)) > 2
    assert max(map(len, commits)) == 1


def test_stores_begin_where_vllm_takes_them_when_it_asks_what_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in vLLM 0.30, whose ``wait_for_save`` does nothing."""
    get_finished = OffloadingConnector.get_finished

    def asked(self: Any, finished: set[str]) -> Any:
        self.connector_worker.prepare_store_kv(self._connector_metadata)
        return get_finished(self, finished)

    monkeypatch.setattr(OffloadingConnector, "wait_for_save", lambda self: None)
    monkeypatch.setattr(OffloadingConnector, "get_finished", asked)
    with running() as replica:
        assert len(_stored(replica, monkeypatch, is_reduced=True)) > 10


def test_vllms_half_is_not_called_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()
    names = {"build_connector_meta", "start_load_kv", "wait_for_save", "get_transfer_results"}

    def noted(name: str) -> Callable[..., Any]:
        theirs = getattr(OffloadingConnector, name)

        def call(*given: Any) -> Any:
            called.add(name)
            return theirs(*given)

        return call

    for name in names:
        monkeypatch.setattr(OffloadingConnector, name, noted(name))
    with running() as replica:
        replica.begin(*[PAGE + 2] * NUM_RUNNING)
        for _ in range(5):
            replica.step()
        replica.settle()
        for _ in range(3 * PAGE):  # a copy may end late, and a page may be full meanwhile
            called.clear()
            replica.step()
            if not called:
                break
        assert not called
        for _ in range(PAGE):
            replica.step()
        assert called == names
        replica.end()


def test_message_of_such_a_step_is_one_object_in_every_process() -> None:
    assert pickle.loads(pickle.dumps(NOTHING)) is NOTHING
    other = pickle.loads(pickle.dumps(TierMetadata({}, {}, step=3)))
    assert other.step == 3
    assert other is not NOTHING
    assert pickle.loads(pickle.dumps(IDLE)) is IDLE
    own = pickle.loads(pickle.dumps(StepMetadata(StepMessage(step=3))))
    assert own.message == StepMessage(step=3)
