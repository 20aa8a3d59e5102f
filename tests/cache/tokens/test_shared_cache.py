"""A cache that threads share. It needs no ``poll``, and is durable without ``drain``."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier.cache.shared import SharedCache, open_cache
from kvtier.cache.tokens import Cache
from kvtier.core.config import CacheConfig
from kvtier.core.errors import Closed, LayoutError, UsageError
from kvtier.core.keys import Namespace
from kvtier.core.types import LoadPolicy, WritePolicy
from kvtier.devices import find_device
from kvtier.layout import DType, full_attention, named_layout
from kvtier.testing import MemoryStorage, StoredBlocks, host_memory
from kvtier.tiers import DeviceTier, StorageFacts
from tests.kit.waiting import wait_until

BLOCK_SIZE = 2
GROUP = full_attention(4, 2, 64, DType.FLOAT32, BLOCK_SIZE)
SETTINGS: dict[str, Any] = {"strict": True, "load_policy": LoadPolicy.ALWAYS}
PROMPT = [1, 1, 2, 2, 10, 10, 9]


class Engine:
    """Threads that compute prompts. The KV of a token is its number."""

    def __init__(self, cache: SharedCache, kv: np.ndarray[Any, Any]) -> None:
        self.cache = cache
        self.kv = kv  # [layer, part, slot, token, head, dim]

    @classmethod
    def on_disk(cls, folder: Path, num_blocks: int = 16, **changes: Any) -> Engine:
        """Open a pool with a disk below it."""
        kv = np.zeros((4, 2, num_blocks, BLOCK_SIZE, 2, 64), np.float32)
        config = CacheConfig(disk_path=str(folder), disk_capacity="1MiB", **SETTINGS | changes)
        return cls(open_cache(kv, "model", config), kv)

    @classmethod
    def over(cls, storage: MemoryStorage, num_blocks: int = 16, **changes: Any) -> Engine:
        """Make a pool over a storage tier that the test can hold up."""
        layout = named_layout("layer_first", GROUP, num_blocks)
        memory = host_memory(layout.nbytes)
        config = CacheConfig(**SETTINGS | changes)
        tier = DeviceTier(memory, layout)
        cache = Cache(config, find_device("cpu"), tier, storage=[storage])
        namespace = Namespace("model", "", "float32", GROUP.fingerprint, BLOCK_SIZE)
        kv = np.frombuffer(memory.owner, np.float32)  # type: ignore[call-overload]
        shape = (4, 2, num_blocks, BLOCK_SIZE, 2, 64)
        return cls(SharedCache(cache, namespace), kv[: layout.nbytes // 4].reshape(shape))

    def serve(self, tokens: list[int], **named: str) -> int:
        """Serve a prompt. Return the number of reused blocks, whose bytes are checked."""
        prompt = self.cache.prompt(tokens, **named)
        lease = self.cache.fetch(prompt)
        assert lease is not None
        for at, token in enumerate(tokens):
            place = self.kv[:, :, lease.slots[at // BLOCK_SIZE], at % BLOCK_SIZE]
            if at < lease.num_shared * BLOCK_SIZE:
                assert (place == token).all()
            else:
                place[:] = token
        num_reused = lease.num_shared
        self.cache.finish(lease)
        return num_reused

    def lose_memory(self) -> None:
        """Evict every block from the pool."""
        assert self.cache.flush()
        self.cache.call(lambda cache: cache.clear("device"))


def tokens(number: int) -> list[int]:
    """Return a prompt of three blocks, the first two of which all prompts share."""
    return [1, 1, 2, 2, 10 + number, 10 + number, 9]


def test_blocks_reach_the_disk_while_nobody_calls(tmp_path: Path) -> None:
    engine = Engine.on_disk(tmp_path)
    engine.serve(PROMPT)
    wait_until(lambda: engine.cache._cache.used_slots()["disk"] == 3)
    engine.cache.close()
    engine = Engine.on_disk(tmp_path)
    assert engine.serve(PROMPT) == 3
    engine.cache.close()


def test_close_writes_what_is_due(tmp_path: Path) -> None:
    engine = Engine.on_disk(tmp_path)
    for number in range(4):
        engine.serve(tokens(number))
    engine.cache.close()
    engine = Engine.on_disk(tmp_path)
    assert [engine.serve(tokens(number)) for number in range(4)] == [3, 3, 3, 3]
    engine.cache.close()


def test_threads_share_blocks_and_room(tmp_path: Path) -> None:
    engine = Engine.on_disk(tmp_path, num_blocks=24)
    counts: list[int] = []

    def ask(thread: int) -> None:
        counts.extend(engine.serve(tokens((thread + turn) % 6)) for turn in range(30))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.cache.flush()
    engine.cache.call(lambda cache: cache.check_invariants())
    assert len(counts) == 120
    assert sum(counts) >= 2 * 120
    engine.cache.close()


def test_tenants_and_adapters_share_nothing(tmp_path: Path) -> None:
    engine = Engine.on_disk(tmp_path)
    engine.serve(PROMPT)
    assert engine.serve(PROMPT, salt="a") == engine.serve(PROMPT, adapter="a") == 0
    assert engine.serve(PROMPT, adapter="a") == engine.serve(PROMPT) == 3
    engine.cache.close()


# -- capacity ------------------------------------------------------------------------------------


def test_a_prompt_without_room_gets_no_lease(tmp_path: Path) -> None:
    engine = Engine.on_disk(tmp_path, num_blocks=4)
    lease = engine.cache.fetch(engine.cache.prompt(PROMPT))
    assert lease is not None
    assert engine.cache.fetch(engine.cache.prompt(tokens(1))) is None
    engine.cache.finish(lease, 0)
    assert engine.serve(tokens(1)) == 0
    engine.cache.close()


def test_a_prompt_waits_for_the_room_of_another(tmp_path: Path) -> None:
    engine = Engine.on_disk(tmp_path, num_blocks=4)
    first = engine.cache.fetch(engine.cache.prompt(PROMPT))
    assert first is not None
    found = []
    thread = threading.Thread(
        target=lambda: found.append(engine.cache.fetch(engine.cache.prompt(tokens(1)), wait_s=60))
    )
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    engine.cache.finish(first)
    thread.join(60)
    assert found[0] is not None
    assert found[0].num_shared == 2
    engine.cache.finish(found[0], 0)
    engine.cache.close()


def test_room_for_the_output_is_reserved(tmp_path: Path) -> None:
    engine = Engine.on_disk(tmp_path)
    lease = engine.cache.fetch(engine.cache.prompt(PROMPT), num_tokens=21)
    assert lease is not None
    assert len(lease.slots) == 11
    engine.cache.finish(lease)
    engine.cache.close()


def test_what_cannot_be_loaded_is_computed() -> None:
    storage = MemoryStorage(GROUP, 16, StoredBlocks())
    engine = Engine.over(storage)
    engine.serve(PROMPT)
    engine.lose_memory()
    storage.unreachable = True
    assert engine.serve(PROMPT) == 0
    assert len(storage.reads) == 1
    assert engine.serve(PROMPT) == 3
    engine.cache.close()


# -- reading ahead -------------------------------------------------------------------------------

IN_HOST: dict[str, Any] = {"host_capacity": 16 * GROUP.bytes_per_block}


def lone_on_disk(storage: MemoryStorage, **changes: Any) -> Engine:
    """Return an engine whose only copy of the prompt is in ``storage``."""
    engine = Engine.over(storage, **changes)
    engine.serve(PROMPT)
    engine.lose_memory()
    if "host_capacity" in changes:
        engine.cache.call(lambda cache: cache.clear("host"))
    return engine


def test_a_queued_prompt_is_read_while_nobody_calls() -> None:
    storage = MemoryStorage(GROUP, 16, StoredBlocks())
    engine = lone_on_disk(storage, **IN_HOST)
    storage.open_reads.clear()
    with engine.cache.prefetch(engine.cache.prompt(PROMPT)) as queued:
        assert storage.is_reading.wait(60)
        assert not queued.ready
        storage.open_reads.set()
        wait_until(lambda: queued.ready)
        assert engine.cache._cache.used_slots() == {"device": 0, "host": 3, "disk": 3}
        assert engine.serve(PROMPT) == 3
    assert len(storage.reads) == 1
    engine.cache.close()


def test_nothing_is_read_ahead_without_host_memory() -> None:
    storage = MemoryStorage(GROUP, 16, StoredBlocks())
    engine = lone_on_disk(storage)
    with engine.cache.prefetch(engine.cache.prompt(PROMPT)) as queued:
        wait_until(lambda: queued.ready)
        assert not storage.reads
        assert engine.serve(PROMPT) == 3
    engine.cache.close()


def test_a_prompt_is_read_ahead_when_storage_has_answered() -> None:
    shelf = StoredBlocks()
    first = Engine.over(MemoryStorage(GROUP, 16, shelf))
    first.serve(PROMPT)
    first.cache.close()
    storage = MemoryStorage(GROUP, 16, shelf, facts=StorageFacts(is_shared=True))
    storage.open_finds.clear()
    engine = Engine.over(storage, **IN_HOST)
    queued = engine.cache.prefetch(engine.cache.prompt(PROMPT))
    assert storage.was_asked.wait(60)
    assert not storage.reads
    storage.open_finds.set()
    wait_until(lambda: queued.ready)
    assert storage.reads
    queued.end()
    queued.end()
    engine.cache.call(lambda cache: cache.check_invariants())
    engine.cache.close()


def test_a_second_prompt_is_read_when_the_first_has_left() -> None:
    storage = MemoryStorage(GROUP, 64, StoredBlocks())
    engine = Engine.over(storage, host_capacity=8 * GROUP.bytes_per_block)
    prompts = [[number] * 8 for number in (1, 2)]
    for prompt in prompts:
        engine.serve(prompt)
        engine.lose_memory()
        engine.cache.call(lambda cache: cache.clear("host"))
    queued = [engine.cache.prefetch(engine.cache.prompt(prompt)) for prompt in prompts]
    wait_until(lambda: queued[0].ready)
    assert not queued[1].ready  # waiting prompts may hold half of the memory
    queued[0].end()
    wait_until(lambda: queued[1].ready)
    queued[1].end()
    engine.cache.close()


# -- durability ----------------------------------------------------------------------------------


def test_stored_is_settled_by_the_last_write() -> None:
    storage = MemoryStorage(GROUP, 16, StoredBlocks())
    storage.open_writes.clear()
    engine = Engine.over(storage, **IN_HOST)
    engine.serve(PROMPT)
    stored = engine.cache.stored(engine.cache.prompt(PROMPT))
    assert not stored.cancel()
    assert storage.is_writing.wait(60)
    assert not stored.done()
    storage.open_writes.set()
    assert stored.result(60) == 6
    assert storage.num_written == 3
    engine.cache.close()


def test_stored_on_disk_means_found_after_a_crash(tmp_path: Path) -> None:
    engine = Engine.on_disk(tmp_path / "a")
    engine.serve(PROMPT)
    assert engine.cache.stored(engine.cache.prompt(PROMPT)).result(60) == 6
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    after = Engine.on_disk(tmp_path / "b")
    assert after.serve(PROMPT) == 3
    after.cache.close()
    engine.cache.close()


def test_stored_counts_what_was_not_written_as_missing() -> None:
    storage = MemoryStorage(GROUP, 16, StoredBlocks())
    engine = Engine.over(storage, write_policy=WritePolicy.WRITE_BACK, **IN_HOST)
    engine.serve(PROMPT)
    assert engine.cache.stored(engine.cache.prompt(PROMPT)).result(60) == 0
    engine.cache.close()
    storage.unreachable = True
    engine = Engine.over(storage)
    engine.serve(PROMPT)
    assert engine.cache.stored(engine.cache.prompt([*PROMPT, 1, 1])).result(60) == 0
    engine.cache.close()


def test_stored_counts_no_deleted_block() -> None:
    engine = Engine.over(MemoryStorage(GROUP, 16, StoredBlocks()))
    prompt = engine.cache.prompt(PROMPT)
    engine.serve(PROMPT)
    assert engine.cache.stored(prompt).result(60) == 6
    lease = engine.cache.fetch(prompt)
    engine.cache.call(lambda cache: cache.delete(prompt.namespace, prompt.labels[:2]))
    assert engine.cache.stored(prompt).result(60) == 0
    assert lease is not None
    engine.cache.finish(lease)
    engine.cache.close()


def test_a_callback_may_use_the_cache() -> None:
    engine = Engine.over(MemoryStorage(GROUP, 16, StoredBlocks()))
    engine.serve(PROMPT)
    found: list[int] = []
    stored = engine.cache.stored(engine.cache.prompt(PROMPT))
    stored.add_done_callback(lambda done: found.append(engine.serve(PROMPT) + done.result()))
    wait_until(lambda: bool(found))
    assert found == [3 + 6]
    engine.cache.close()


def test_a_future_fails_if_the_cache_is_closed_first() -> None:
    storage = MemoryStorage(GROUP, 16, StoredBlocks())
    storage.open_writes.clear()
    engine = Engine.over(storage)
    engine.serve(PROMPT)
    stored = engine.cache.stored(engine.cache.prompt(PROMPT))
    assert storage.is_writing.wait(60)
    thread = threading.Thread(target=engine.cache.close, args=(0.0,))
    thread.start()
    assert isinstance(stored.exception(60), Closed)
    storage.open_writes.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_future_fails_if_the_thread_of_the_cache_ends() -> None:
    storage = MemoryStorage(GROUP, 16, StoredBlocks())
    storage.open_writes.clear()
    engine = Engine.over(storage)
    engine.serve(PROMPT)
    stored = engine.cache.stored(engine.cache.prompt(PROMPT))

    def broken() -> None:
        raise ValueError("a plug-in")

    right, engine.cache._cache.poll = engine.cache._cache.poll, broken  # type: ignore[method-assign]
    assert isinstance(stored.exception(60), Closed)
    engine.cache._cache.poll = right  # type: ignore[method-assign]
    storage.open_writes.set()
    engine.cache.close()


# -- arguments -----------------------------------------------------------------------------------


def test_a_pool_of_any_layout_is_restored(tmp_path: Path) -> None:
    group = kvtier.latent_attention(3, 64, 32, DType.FLOAT16, BLOCK_SIZE)
    kv = np.zeros((16, group.bytes_per_block), np.uint8)
    config = CacheConfig(disk_path=str(tmp_path), disk_capacity="1MiB", **SETTINGS)
    cache = open_cache(kv, "mla", config, group=group, layout="block_first")
    prompt = cache.prompt(PROMPT)
    lease = cache.fetch(prompt)
    assert lease is not None
    for at in range(3):
        kv[lease.slots[at]] = at + 1
    cache.finish(lease)
    assert cache.stored(prompt).result(60) == 6
    cache.call(lambda each: each.clear("device"))
    kv[:] = 0
    lease = cache.fetch(prompt)
    assert lease is not None
    assert [set(kv[slot]) for slot in lease.slots[:3]] == [{1}, {2}, {3}]
    cache.finish(lease)
    cache.close()


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_a_tensor_is_restored(dtype: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    random = torch.randint(0, 120, (4, 2, 16, BLOCK_SIZE, 2, 64), dtype=torch.uint8)
    kv = torch.zeros(random.shape, dtype=getattr(torch, dtype))
    config = CacheConfig(disk_path=str(tmp_path), disk_capacity="1MiB", **SETTINGS)
    cache = open_cache(kv, "model", config)
    prompt = cache.prompt(torch.tensor(PROMPT).numpy())
    lease = cache.fetch(prompt)
    assert lease is not None
    written = list(lease.slots[:3])
    kv[:, :, written] = random[:, :, :3].to(kv.dtype)
    right = kv[:, :, written].clone()
    cache.finish(lease)
    assert cache.stored(prompt).result(60) == 6
    cache.call(lambda each: each.clear("device"))
    kv.zero_()
    lease = cache.fetch(prompt)
    assert lease is not None
    assert torch.equal(kv[:, :, list(lease.slots[:3])].float(), right.float())
    assert right.float().abs().sum() > 0
    cache.finish(lease)
    with pytest.raises(LayoutError, match="gaps"):
        open_cache(kv.transpose(0, 2), "model", group=GROUP)
    cache.close()


@pytest.mark.parametrize(
    ("kv", "sentence"),
    [
        (np.zeros((4, 3, 8, 2, 2, 64), np.float32), r"\(4, 3, 8, 2, 2, 64\), not \[num_layers, 2"),
        (np.zeros((4, 2, 8, 2, 2), np.float32), "reshape it"),
        (np.zeros((4, 2, 8, 2, 2, 64), np.float64), "float64"),
        (np.zeros((4, 2, 8, 2, 2, 64), np.float32)[:, :, ::2], "gaps"),
    ],
)
def test_memory_of_another_shape_is_refused(kv: np.ndarray[Any, Any], sentence: str) -> None:
    with pytest.raises(LayoutError, match=sentence):
        open_cache(kv, "model")


def test_read_only_memory_is_refused() -> None:
    kv = np.zeros((4, 2, 8, 2, 2, 64), np.float32)
    kv.flags.writeable = False
    with pytest.raises(LayoutError, match="read-only"):
        open_cache(kv, "model")


def test_a_cache_without_a_model_makes_no_prompts() -> None:
    cache = open_cache(np.zeros((4, 2, 8, 2, 2, 64), np.float32), "")
    with pytest.raises(UsageError, match="without a model"):
        cache.prompt(PROMPT)
    cache.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.serve(PROMPT),
        lambda engine: engine.cache.flush(),
        lambda engine: engine.cache.stored(engine.cache.prompt(PROMPT)),
        lambda engine: engine.cache.prefetch(engine.cache.prompt(PROMPT)),
        lambda engine: engine.cache.observe_prefill(0, 2, 0.1),
    ],
)
def test_a_closed_one_says_so(tmp_path: Path, use: Callable[[Engine], object]) -> None:
    engine = Engine.on_disk(tmp_path)
    engine.cache.close()
    engine.cache.close()
    assert not engine.cache.is_usable
    with pytest.raises(Closed):
        use(engine)


def test_request_larger_than_the_pool_does_not_wait(tmp_path: Path) -> None:
    engine = Engine.on_disk(tmp_path, num_blocks=4)
    prompt = engine.cache.prompt(PROMPT)
    assert engine.cache.fetch(prompt, num_tokens=100, wait_s=float("inf")) is None
    engine.cache.close()


def test_finished_lease_says_how_much_was_reused(tmp_path: Path) -> None:
    engine = Engine.on_disk(tmp_path)
    for num_reused in (0, 3):
        lease = engine.cache.fetch(engine.cache.prompt(PROMPT))
        assert lease is not None
        engine.cache.finish(lease)
        assert lease.num_shared == num_reused
    engine.cache.close()


def test_generated_tokens_are_kept_behind_their_prompt(tmp_path: Path) -> None:
    engine = Engine.on_disk(tmp_path)
    whole = [*PROMPT, 9, 9, 9]
    lease = engine.cache.fetch(engine.cache.prompt(PROMPT), num_tokens=len(whole))
    assert lease is not None
    for at, token in enumerate(whole):
        engine.kv[:, :, lease.slots[at // BLOCK_SIZE], at % BLOCK_SIZE] = token
    with pytest.raises(UsageError, match="does not begin with the prompt of the lease"):
        engine.cache.finish(lease, prompt=engine.cache.prompt([5, *whole]))
    labels = lease.labels
    for refused in (-1, len(lease.slots) + 1):
        with pytest.raises(UsageError, match=f"finish: {refused} blocks can't be added"):
            engine.cache.finish(lease, refused, prompt=engine.cache.prompt(whole))
    assert lease.labels == labels, "a refused call changes nothing"
    engine.cache.finish(lease, prompt=engine.cache.prompt(whole))
    num_blocks = (len(whole) - 1) // BLOCK_SIZE  # the last token is always computed
    assert engine.serve(whole) == num_blocks > len(PROMPT) // BLOCK_SIZE
    engine.cache.close()
