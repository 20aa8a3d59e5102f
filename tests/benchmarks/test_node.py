"""The benchmark of a node: its own logic, and small runs in real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.node import copies, killed, look_up, tokens
from benchmarks.node.look_up import Round
from benchmarks.node.part import Part, table
from benchmarks.node.processes import (
    attached,
    blocks_of,
    check_all_there,
    mapped,
    running_node,
    store,
)
from benchmarks.node.tokens import Request, Tokens
from benchmarks.scale.keyed import new_keys
from kvtier.cache.block_cache import BlockState
from kvtier.layout import opaque
from kvtier.node.client.channel import NodeClient
from kvtier.node.client.tier import NodeTier
from kvtier.tiers import Pieces, StorageSite
from tests.node.harness import LocalNode, local_node


def asked(*chains: list[int]) -> list[Request]:
    """Return requests of 10 tokens per block, the last block of which is half full."""
    return [
        (float(at), np.array(chain, np.uint64), 10 * len(chain) - 5)
        for at, chain in enumerate(chains)
    ]


# -- tokens ----------------------------------------------------------------------------------------


def test_request_finds_in_one_cache_what_another_engine_has_stored() -> None:
    requests = asked([1, 2, 3], [1, 2, 3], [1, 2, 4])
    assert tokens.replay(requests, 10, [0, 0, 0], 8) == Tokens(25 + 20, 75)
    assert tokens.replay(requests, 10, [0, 1, 1], 8) == Tokens(20, 75)


def test_ratio_is_of_tokens_over_the_routings() -> None:
    together = Tokens(60, 100)
    found = tokens.ratio_of(together, [Tokens(num, 100) for num in (20, 30, 30, 30, 30, 40)])
    assert (found.value, found.low, found.high) == (2.0, 1.5, 3.0)
    assert tokens.ratio_of(together, [Tokens(0, 100)]).value == float("inf")
    assert tokens.ratio_of(Tokens(0, 100), [Tokens(0, 100)]).value == 0.0


# -- look-ups --------------------------------------------------------------------------------------


def test_a_node_is_judged_by_what_it_adds_round_by_round() -> None:
    slow_minutes = [1.0, 9.0, 1.0, 9.0, 1.0, 9.0]
    own = [Round(ms, 2 * ms, 0.0, 0.0, 100.0) for ms in slow_minutes]
    node = [Round(ms + 0.05, 2 * ms + 2.0, 0.0, 0.0, 100.0) for ms in slow_minutes]
    p50, p99 = look_up.targets(node, own)
    assert (p50["value"], p50["met"]) == (0.05, True)
    assert (p99["value"], p99["met"]) == (2.0, False)


def test_missing_block_ends_the_benchmark() -> None:
    there = [BlockState.MEMORY] * 3
    check_all_there(there)
    with pytest.raises(RuntimeError, match="1 of 4"):
        check_all_there([*there, BlockState.NOWHERE])


def test_both_caches_find_a_prompt(tmp_path: Path) -> None:
    keys = new_keys(50)
    own = look_up.cache_in_process(100)
    store(own, keys)
    with local_node(tmp_path) as node, attached(node.config.socket, look_up.BLOCK_BYTES) as cache:
        store(cache, keys)
        for each in own, cache:
            assert len(look_up.ask(each, keys, 3, rate=1e6).seconds) == 3
        with pytest.raises(RuntimeError, match="1 of 1"):
            look_up.ask(cache, new_keys(1), 1)
        node.until(lambda: not node_leases(node))


def node_leases(node: LocalNode) -> int:
    return sum(engine.num_slots for engine in node.server.registry.engines.values())


def test_steps_of_a_look_up_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_up, "HOST_BYTES", 1 << 20)
    monkeypatch.setattr(look_up, "SEGMENT_BYTES", 1 << 18)
    assert len(look_up._steps(2, 1)) == 8


# -- bytes -----------------------------------------------------------------------------------------


def test_node_in_a_process_of_its_own_keeps_blocks() -> None:
    keys = new_keys(3)
    with running_node(1 << 20, 1 << 18) as node, attached(node.config.socket, 4096) as cache:
        store(cache, keys)
        check_all_there(cache.lookup(keys).states)
        assert node.cpu_s > 0
        assert node.own_bytes > 0


def test_wrong_byte_in_a_slot_is_noticed(tmp_path: Path) -> None:
    keys = new_keys(3)
    with (
        local_node(tmp_path) as node,
        attached(node.config.socket, killed.BLOCK_BYTES, "one") as cache,
        mapped(node.config.socket, killed.BLOCK_BYTES, "one") as host,
    ):
        assert killed.store(cache, host, keys)
        unknown = new_keys(1)
        assert killed.load(cache, host, [*keys, *unknown]) == (3, 0, unknown)
        held = cache.hold(keys[1:2])
        (slot,), memory = held.slots, host.memory_of(held.guard)
        blocks_of(memory, killed.BLOCK_BYTES)[slot, 100] ^= 1
        cache.release(keys[1:2])
        assert killed.load(cache, host, keys) == (3, 1, [])


def test_other_bytes_from_a_copy_end_the_benchmark(tmp_path: Path) -> None:
    pool = copies.Pool(2, 64)
    own = copies.Own(2, pool)
    block_bytes = 64 * copies.NUM_FRAGMENTS
    with local_node(tmp_path) as node:
        site = StorageSite("node", "node", opaque(block_bytes), 1 << 20)
        tier = NodeTier(site, NodeClient(node.config.socket))
        for side in own, copies.InNode(tier, 2):
            for number in range(3):
                assert copies.turn(side, number, pool).keys() == {copies.STORE, copies.LOAD}
        tier.close()

    class Wrong(copies.Own):
        def load(self, pieces: Pieces) -> None:
            self.prepare(1)
            super().load(pieces)

    wrong = Wrong(2, pool)
    with pytest.raises(RuntimeError, match="other bytes"):
        copies.turn(wrong, 0, pool)
    wrong.close()
    own.close()


def test_pool_has_other_bytes_in_each_fragment_and_round() -> None:
    pool = copies.Pool(2, 64)
    seen = set()
    for number in range(3):
        pool.fill(number)
        seen |= {fragment.tobytes() for layer in pool.bytes for fragment in layer}
    assert len(seen) == 3 * 2 * copies.NUM_FRAGMENTS


# -- the command -----------------------------------------------------------------------------------


def test_table_has_a_column_for_each_field() -> None:
    made = table("name", Part([{"what": "a", "median": 1234.5}], []))
    assert [column.header for column in made.columns] == ["what", "median"]
    assert [list(column.cells) for column in made.columns] == [["a"], ["1,234"]]


def test_missing_trace_is_said_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.node", "--parts", "tokens", "--trace"]
    command.append(str(tmp_path / "none"))
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1
    assert "--trace" in run.stderr
