"""The whole cache against a dictionary: random requests, faults, evictions, late and lost loads.

After every step the bytes are right, no slot leaks, the leases balance and the invariants hold.
Copies are held or run as the machine decides; nothing depends on the speed of a thread.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.cache.transfer import LayerGate
from kvtier.core.errors import DeviceError
from kvtier.core.hints import Hint, Retain
from kvtier.core.keys import token_labels
from kvtier.core.types import DEVICE, DISK, HOST, WritePolicy
from kvtier.devices import Direction
from kvtier.index import State
from kvtier.index.trie import Node
from kvtier.layout import ORDERS
from tests.cache.tokens.harness import BLOCK_SIZE, DEADLINE_S, GROUP, Harness, Request, count


def _prompt(num_tokens: int, fork: int) -> list[int]:
    """Return a prompt with a shared beginning: token 1 up to ``fork``, token 2 from there on."""
    return [1 if position < fork else 2 for position in range(num_tokens)]


@pytest.fixture(autouse=True, scope="module")
def small_steps() -> Iterator[None]:
    """Make every layer of a load a step, and lengthen the time-outs for slow machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtier.cache.transfer.staging.STEP_BYTES", 1)
        patch.setattr("kvtier.cache.transfer.copy_job.PATIENCE_S", 60.0)
        patch.setattr(
            "kvtier.cache.transfer.local.TIMEOUT_S", {"find": 1e3, "read": 1e3, "write": 1e3}
        )
        yield


prompts = st.builds(_prompt, st.sampled_from([9, 8, 5, 4, 13, 0]), st.sampled_from([13, 4, 7, 0]))
namespaces = st.sampled_from([b"one", b"one", b"one", b"two"])
directions = st.sampled_from(Direction)
HINTS = [
    Hint(),
    Hint(back_in_s=DEADLINE_S),
    Hint(ended=True),
    Hint((Retain(90, last_token=3), Retain(10, 3, ttl_s=1.0))),
]


class CacheMachine(RuleBasedStateMachine):
    make_harness = Harness
    policy = WritePolicy.WRITE_THROUGH
    disk_blocks = 0
    has_lost = False

    @initialize(
        layout=st.sampled_from(sorted(ORDERS)),
        prefill_s=st.sampled_from([None, None, 1e9, 1e-15]),
        host_blocks=st.sampled_from([4, 20, 20]),
        store_batch_bytes=st.sampled_from([0, 0, 3 * GROUP.bytes_per_block, 1 << 20]),
        opens_in_steps=st.booleans(),
    )
    def make(
        self,
        layout: str,
        prefill_s: float | None,
        host_blocks: int,
        store_batch_bytes: int,
        opens_in_steps: bool,
    ) -> None:
        """Make a harness. ``prefill_s`` per token is unknown, too low for reloads, or very high."""
        self.harness = self.make_harness(
            self.policy,
            layout=layout,
            host_blocks=host_blocks,
            store_batch_bytes=store_batch_bytes,
            disk_blocks=self.disk_blocks,
            opens_in_steps=opens_in_steps,
        )
        self.cache, self.device = self.harness.cache, self.harness.device
        self.committed: set[tuple[bytes, ...]] = set()
        self.is_held = False
        if prefill_s is not None:
            self.cache.observe_prefill(0, 1, prefill_s)

    # -- requests ----------------------------------------------------------------------------------

    @rule(
        tokens=prompts,
        namespace=namespaces,
        keep=st.sampled_from([False, False, False, True]),
        times=st.integers(1, 2),
        clear=st.booleans(),
    )
    def serve(
        self, tokens: list[int], namespace: bytes, keep: bool, times: int, clear: bool
    ) -> None:
        """Serve requests from start to end unless they have to wait. ``clear``: the device."""
        for _ in range(times):
            request = self._fetch(tokens, namespace)
            if request is None:
                return
            if not self.is_held:
                self.cache.poll()
            if request.lease.ready and not request.lease.broken:
                self.harness.check_request(request)
                self.harness.compute(request, len(request.labels))
                self._commit(request, len(request.labels))
            if not keep or len(self.harness.requests) > 2:
                self._release(request)
        if clear:
            self.clear(DEVICE)

    @precondition(lambda self: len(self.harness.requests) < 3)
    @rule(
        tokens=prompts,
        namespace=namespaces,
        num_output_blocks=st.integers(0, 2),
        grain_blocks=st.sampled_from([1, 1, 2]),
        load=st.sampled_from([True, True, True, False]),
        hold=st.booleans(),
    )
    def fetch(
        self,
        tokens: list[int],
        namespace: bytes,
        num_output_blocks: int,
        grain_blocks: int,
        load: bool,
        hold: bool,
    ) -> None:
        if hold:
            self.hold()
        self._fetch(tokens, namespace, num_output_blocks, grain_blocks, load)

    def _fetch(
        self,
        tokens: list[int],
        namespace: bytes,
        num_output_blocks: int = 0,
        grain_blocks: int = 1,
        load: bool = True,
    ) -> Request | None:
        could_be_had = self._num_could_be_had()
        request = self.harness.fetch(tokens, num_output_blocks, grain_blocks, load, namespace)
        self._settle()
        if request is None:
            wanted = len(tokens) // BLOCK_SIZE + 1 + num_output_blocks
            assert wanted > could_be_had, "refused, though there was room"
            return None
        num_shared = request.lease.num_shared
        assert num_shared % grain_blocks == 0
        assert num_shared * BLOCK_SIZE < max(len(tokens), 1), "no token is left to compute"
        assert all(self._key(request, n) in self.committed for n in range(1, num_shared + 1))
        assert load or request.lease.ready, "waits for a load that was not wanted"
        return request

    @precondition(lambda self: len(self.harness.requests) < 2 and self.committed)
    @rule(data=st.data(), num_requests=st.integers(1, 3))
    def load_the_same_prompt_for_several(self, data: st.DataObject, num_requests: int) -> None:
        """No load ends before the machine releases it."""
        namespace, *labels = data.draw(st.sampled_from(sorted(self.committed)))
        tokens = np.frombuffer(b"".join(labels), "<u4").tolist()
        self.clear(DEVICE)
        self.hold()
        for number in range(num_requests):
            self._fetch([*tokens, *[2] * (1 + number)], namespace)

    def _num_could_be_had(self) -> int:
        """Number of free device slots, and of blocks that are evictable with all below them."""
        free = self.cache.num_available_slots - self.cache._index.num_evictable(DEVICE)

        def may_leave(node: Node) -> bool:
            place = node.residencies[0]
            stays = place.state is State.WRITING or place.leases > 0
            return not stays and all(map(may_leave, node.children.values()))

        return free + sum(
            node.residencies[0].state is State.READY and may_leave(node)
            for node in self.harness.nodes()
        )

    def _release(self, request: Request) -> None:
        self.harness.release(request)
        self._settle()

    def _key(self, request: Request, num_blocks: int) -> tuple[bytes, ...]:
        return (request.namespace, *request.labels[:num_blocks])

    def _usable(self) -> list[Request]:
        return [r for r in self.harness.requests if r.lease.ready and not r.lease.broken]

    def _draw(self, data: st.DataObject, requests: list[Request]) -> Request:
        number = data.draw(st.integers(0, len(requests) - 1), label="request")
        return requests[number]

    @precondition(lambda self: self._usable())
    @rule(data=st.data())
    def compute_and_commit(self, data: st.DataObject) -> None:
        """Compute some more blocks. Only a part of the computed blocks may be committed."""
        request = self._draw(data, self._usable())
        written = request.num_written
        to = data.draw(st.integers(written, max(written, len(request.labels))))
        self.harness.check_request(request)
        self.harness.compute(request, to)
        self._commit(request, data.draw(st.integers(0, to)))

    def _commit(self, request: Request, num_blocks: int) -> None:
        self.cache.commit(request.lease, num_blocks)
        for num_blocks in range(1, request.lease.num_shared + 1):
            self.committed.add(self._key(request, num_blocks))
        self._settle()

    @rule(
        tokens=prompts,
        namespace=namespaces,
        hint=st.sampled_from(HINTS),
        is_waiting=st.booleans(),
    )
    def say(self, tokens: list[int], namespace: bytes, hint: Hint, is_waiting: bool) -> None:
        """Hints change the eviction order, and nothing else."""
        labels = token_labels(tokens, BLOCK_SIZE)
        self.cache.hint(namespace, labels, hint)
        self.cache.wait(namespace, labels, is_waiting)

    @precondition(lambda self: not self.is_held)
    @rule(tokens=prompts, namespace=namespaces)
    def follow(self, tokens: list[int], namespace: bytes) -> None:
        """A layer's bytes are present once compute was held for it, before the lease is ready."""
        request = self.harness.fetch(tokens, namespace=namespace)
        if request is None:
            return
        gate = self.cache.follow(request.lease)
        if gate is not None:
            self._follow(request, gate)
        self._settle()
        self._release(request)

    def _follow(self, request: Request, gate: LayerGate) -> None:
        try:
            for layer in range(GROUP.num_layers):
                gate.hold_compute(layer)
                self._check_layer(request, layer)
            gate.wait()
        except DeviceError:
            self.harness.wait()
            self.cache.poll()
            assert request.lease.broken, "the gate was shut for no reason"

    def _check_layer(self, request: Request, layer: int) -> None:
        content = self.harness.contents()[DEVICE]
        per_layer = GROUP.bytes_per_block // GROUP.num_layers
        part = slice(layer * per_layer, (layer + 1) * per_layer)
        for position in range(request.lease.num_shared):
            found = content[request.lease.slots[position]][part]
            assert np.array_equal(found, self.harness.expected(request, position)[part])

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Release any request, including one that still waits, as when its client disconnects."""
        request = self._draw(data, self.harness.requests)
        self._release(request)
        self.cache.release(request.lease)

    @precondition(lambda self: any(r.lease.broken for r in self.harness.requests))
    @rule(data=st.data())
    def recompute_what_did_not_arrive(self, data: st.DataObject) -> None:
        request = self._draw(data, [r for r in self.harness.requests if r.lease.broken])
        self._release(request)
        num_blocks = request.num_tokens // BLOCK_SIZE + 1
        lease = self.cache.fetch(
            request.namespace, request.labels, request.num_tokens, num_blocks, load=False
        )
        assert lease is None or (lease.ready and not lease.broken)
        if lease is not None:
            again = Request(request.namespace, request.labels, request.num_tokens, lease)
            self.harness.requests.append(again)
            self.harness.compute(again, len(again.labels))
            self._commit(again, len(again.labels))
        self._settle()

    # -- copies ------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Run all copies unless they are held. The cache notices none before the next poll."""
        self.harness.wait_for_threads()
        if not self.is_held:
            self.harness.wait()

    @rule()
    def poll(self) -> None:
        self.cache.poll()
        self._settle()

    @rule()
    def drain(self) -> None:
        self.release_device()
        assert self.cache.drain()
        assert all(request.lease.ready for request in self.harness.requests)

    def hold(self) -> None:
        """Hold loads, and stores unless the policy is write-back: demotions wait for stores."""
        self.is_held = True
        held = [Direction.LOAD] if self.policy is WritePolicy.WRITE_BACK else list(Direction)
        self.device.hold(*held)

    @rule()
    def release_device(self) -> None:
        self.is_held = False
        self.device.release()
        self.harness.wait()

    @rule(direction=directions, nth=st.integers(1, 2), how=st.sampled_from(["", "half", "crash"]))
    def fail(self, direction: Direction, nth: int, how: str) -> None:
        faults = {
            "": self.device.fail,
            "half": self.device.fail_half_way,
            "crash": self.device.crash,
        }
        faults[how](direction, nth)

    @precondition(lambda self: any(not r.lease.ready for r in self.harness.requests))
    @rule()
    def be_late(self) -> None:
        """Let the deadline of every load pass."""
        self.harness.clock.now += DEADLINE_S + 1
        self.cache.poll()
        assert all(request.lease.ready for request in self.harness.requests)
        self._settle()

    @precondition(lambda self: self.harness.host.num_open < self.harness.host.num_slots)
    @rule()
    def open_more(self) -> None:
        self.harness.open_more()

    @rule(tier=st.sampled_from([DEVICE, DEVICE, HOST]))
    def clear(self, tier: str) -> None:
        self.cache.poll()
        self.cache.clear(tier)
        self._settle()

    # -- after every step --------------------------------------------------------------------------

    @invariant()
    def bytes_are_right_and_everything_adds_up(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    @rule(tokens=prompts, namespace=namespaces)
    def match(self, tokens: list[int], namespace: bytes) -> None:
        """The match is not longer than what was committed. It is shorter only after an eviction."""
        labels = token_labels(tokens, BLOCK_SIZE)
        num_blocks = self.cache.match(namespace, labels).num_blocks
        known = [n for n in range(len(labels) + 1) if (namespace, *labels[:n]) in self.committed]
        longest = max(known, default=0)
        assert num_blocks <= longest, "a block that nobody committed"
        evicted = sum(
            count(self.cache.metrics, "kvtier_evicted_blocks_total", tier=tier)
            for tier in self.harness.tiers
        )
        may_be_shorter = evicted or self.has_lost
        assert may_be_shorter or num_blocks == longest, "a block is lost that nobody evicted"

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.close()


class StorageMachine(CacheMachine):
    """The machine with a small storage tier, which may hang, lose blocks, and restart."""

    disk_blocks = 10

    @rule()
    def hold(self) -> None:
        super().hold()
        self.harness.storage.open_reads.clear()
        self.harness.storage.open_writes.clear()

    @rule()
    def release_device(self) -> None:
        self.harness.open_storage()
        super().release_device()

    @precondition(lambda self: self.harness.shelf.blocks)
    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        """Make a block unreadable from now on."""
        number = data.draw(st.integers(0, len(self.harness.shelf.blocks) - 1), label="block")
        self.harness.storage.spoiled.add(list(self.harness.shelf.blocks)[number])
        self.has_lost = True

    @precondition(lambda self: self.harness.shelf.blocks)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """Make a block unwritable from now on."""
        number = data.draw(st.integers(0, len(self.harness.shelf.blocks) - 1), label="block")
        self.harness.storage.refused.add(list(self.harness.shelf.blocks)[number])

    @rule(disk_blocks=st.sampled_from([10, 10, 4]), opens_in_steps=st.booleans())
    def restart(self, disk_blocks: int, opens_in_steps: bool) -> None:
        """A new cache recovers the blocks that the last one has stored."""
        self.release_device()
        shelf = self.harness.shelf
        self.harness.end()
        self.harness = self.make_harness(
            self.policy,
            host_blocks=20,
            disk_blocks=disk_blocks,
            shelf=shelf,
            layout="layer_first",
            opens_in_steps=opens_in_steps,
        )
        self.cache, self.device = self.harness.cache, self.harness.device
        self.has_lost = True

    @precondition(lambda self: len(self.harness.prefetches) < 3)
    @rule(tokens=prompts, namespace=namespaces, hold=st.booleans())
    def prefetch(self, tokens: list[int], namespace: bytes, hold: bool) -> None:
        if hold:
            self.hold()
        prefetch = self.harness.prefetch(tokens, namespace)
        assert prefetch is not None or len(self.harness.prefetches) > 0, (
            "refused, though none holds"
        )
        self._settle()

    @precondition(lambda self: self.harness.prefetches)
    @rule(data=st.data())
    def end_prefetch(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.harness.prefetches) - 1), label="prefetch")
        self.harness.end_prefetch(self.harness.prefetches[number])
        self._settle()

    @rule()
    def clear_storage(self) -> None:
        self.cache.poll()
        self.cache.clear(DISK)
        self._settle()


class SelectiveMachine(CacheMachine):
    policy = WritePolicy.WRITE_THROUGH_SELECTIVE


class WriteBackMachine(CacheMachine):
    policy = WritePolicy.WRITE_BACK


STEPS = settings(stateful_step_count=60, max_examples=2 * settings.default.max_examples)


def test_cache_that_writes_through() -> None:
    run_state_machine_as_test(CacheMachine, settings=STEPS)


def test_cache_over_storage() -> None:
    run_state_machine_as_test(StorageMachine, settings=STEPS)


def test_cache_that_writes_through_selectively() -> None:
    run_state_machine_as_test(SelectiveMachine, settings=STEPS)


def test_cache_that_writes_back() -> None:
    run_state_machine_as_test(WriteBackMachine, settings=STEPS)
