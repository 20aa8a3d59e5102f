"""Events of a node, read as routers read them: what engines have described, and no more."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.keys import PackedKeys
from kvtier.core.types import DISK, HOST
from kvtier.index import State
from kvtier.node.client import cache as client
from kvtier.node.client.cache import NodeCache
from kvtier.node.config import EventsAddress, TenantQuota, parse_events
from kvtier.node.server import events
from kvtier.node.wire.protocol import DescribeNotice, OpenRequest
from kvtier.observe import block_events, publisher
from tests.kit.waiting import wait_until
from tests.node.harness import BLOCK, LocalNode, bare, local_node, node_cache
from tests.observe.test_block_events import Reader
from tests.serve.server.test_events import ANY_PORT, Router, router

ANYWHERE = EventsAddress(ANY_PORT, ANY_PORT)
SIZE = 2
"""Tokens per block."""
Serve = Callable[..., LocalNode]
Attach = Callable[..., NodeCache]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that starts a node with a disk, which publishes at some addresses."""
    with ExitStack() as stack:

        def started(*models: str, **options: Any) -> LocalNode:
            disk = {"disk_path": str(tmp_path / "disk"), "disk_capacity": "1MiB"}
            addresses = dict.fromkeys(models, ANYWHERE)
            made = local_node(tmp_path, events=addresses, **disk, **options)
            return stack.enter_context(made)

        yield started


@pytest.fixture
def attach(serve: Serve) -> Iterator[Attach]:
    """Return a function that attaches an engine whose weights have a number."""
    with ExitStack() as stack:

        def attached(node: LocalNode, weights: int = 0, **options: Any) -> NodeCache:
            made = node_cache(node.config.socket, bytes([weights]) * 32, **options)
            stack.callback(made.close)
            return made

        yield attached


def key_of(*tokens: int) -> bytes:
    """Return the key of the block that ends a prompt of these tokens: it begins with its hash."""
    return random.Random(repr(tokens)).randbytes(36)


def keys_of(prompt: list[int]) -> list[bytes]:
    return [key_of(*prompt[:end]) for end in range(SIZE, len(prompt) + 1, SIZE)]


def hash_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


def description(prompt: list[int], first: int = 0, **more: Any) -> DescribeNotice:
    """Describe a prompt's blocks from ``first`` on."""
    keys = keys_of(prompt)
    prompt = prompt[: len(keys) * SIZE]
    return DescribeNotice(
        **{
            "partition": 0,
            "keys": b"",
            "model": "model",
            "block_size": SIZE,
            "hash_bytes": 8,
            "hashes": b"".join(key[:8] for key in keys[first:]),
            "parent": keys[first - 1][:8] if first else b"",
            "tokens": b"".join(token.to_bytes(4, "little") for token in prompt[first * SIZE :]),
            **more,
        }
    )


def store(cache: NodeCache, prompt: list[int], describes: bool = True, **more: Any) -> None:
    """Store a prompt's blocks, after they were described."""
    keys = keys_of(prompt)
    cache.on_request(keys)
    if describes and cache.undescribed(keys):
        cache.describe(keys, description(prompt, **more))
    reserved = cache.reserve(keys)
    if reserved is not None:
        cache.commit(reserved.keys, range(len(reserved.keys)))
    cache.poll()


def held(node: LocalNode, number: int = 0) -> dict[str, set[int]]:
    """Return the hashes of a partition's blocks by tier."""

    def find() -> dict[str, set[int]]:
        partition = node.node.partitions[number]
        blocks = list(partition._index.known())
        tiers = partition._index.tiers
        return {
            tier: {hash_of(b.key) for b in blocks if b.places[at][0] is State.READY}
            for at, tier in enumerate(tiers)
        }

    return node.do(find)


def settle(node: LocalNode) -> None:
    """Wait until nothing moves between tiers."""
    node.until(lambda: not any(each.cache.is_busy for each in node.node.partitions))


def endpoints(node: LocalNode, model: str = "") -> list[str]:
    assert node.node.events is not None
    return node.node.events.endpoints(model)


def known(reads: Router) -> dict[str, set[int]]:
    """Return what a reader of all events knows."""
    reads.replay(0)
    found = reads.reader().held
    return {HOST: found[HOST], DISK: found[DISK]}


def knows(reads: Router, hashes: set[int]) -> bool:
    return known(reads)[HOST] == hashes


def event_of(reads: Router, hash_: int) -> Any:
    """Return the first event that stores a block."""
    for at in sorted(reads.batches):
        for event in reads.batches[at][1]:
            if event["type"] == "BlockStored" and hash_ in event["block_hashes"]:
                return event
    raise AssertionError("it was not published")


def test_routers_know_what_engines_have_described_of_a_node_that_evicts(
    serve: Serve, attach: Attach
) -> None:
    chosen = random.Random(1)
    prompts = [[chosen.randrange(3) for _ in range(chosen.randrange(2, 13))] for _ in range(200)]
    node = serve("", host_capacity="256KiB")
    caches = [attach(node) for _ in range(2)]
    with router(endpoints(node)) as reads:
        for at, prompt in enumerate(prompts):
            cache = chosen.choice(caches)
            store(cache, prompt, describes=at % 8 > 0)
            if at % 20 == 19:
                cache.lookup(keys_of(chosen.choice(prompts)))
                settle(node)
        undescribed = {hash_of(key) for prompt in prompts for key in keys_of(prompt)}
        for cache in caches:
            undescribed -= {hash_of(key) for key in cache._partition.described}
        settle(node)

        def agree() -> bool:
            there = {tier: each - undescribed for tier, each in held(node).items()}
            return known(reads) == there

        wait_until(agree, "the router knows what is there")
        assert all(len(each) > 10 for each in known(reads).values())
        assert held(node)[HOST] != held(node)[DISK]
        reads.asking.send_multipart([b"", b"snapshot"])
        assert reads.asking.poll(10_000)
        _, _, _, *batches = reads.asking.recv_multipart()
        late = Reader()
        for batch in batches:
            late.read(msgspec.msgpack.decode(batch)[1])
        for tier in HOST, DISK:
            there = held(node)[tier] - undescribed
            above = {h for h in there if late.parents.get(h) is None or h in late.held[tier]}
            assert late.held[tier] <= there
            assert late.held[tier] >= above & set(late.tokens)
        assert late.held[DISK]


def test_an_event_has_what_its_engine_says_of_the_block(serve: Serve, attach: Attach) -> None:
    node, prompt = serve(""), [1, 2, 3, 4, 5, 6]
    cache = attach(node)
    extra_keys = msgspec.msgpack.encode([["adapter", "salt"], ["adapter"], None])
    lora: Any = {"lora_id": 3, "lora_name": "adapter"}
    with router(endpoints(node)) as reads:
        store(
            cache,
            prompt,
            salt="salt",
            group=1,
            kind="full_attention",
            extra_keys=extra_keys,
            **lora,
        )
        wait_until(lambda: len(known(reads)[DISK]) == 3, "it is published")
        event = event_of(reads, hash_of(keys_of(prompt)[0]))
    assert event == {
        "type": "BlockStored",
        "block_hashes": [hash_of(key) for key in keys_of(prompt)],
        "parent_block_hash": None,
        "token_ids": prompt,
        "block_size": SIZE,
        "cache_salt": "salt",
        "extra_keys": [["adapter", "salt"], ["adapter"], None],
        "medium": "CPU",
        "locality": "LOCAL",
        "group_idx": 1,
        "kv_cache_spec_kind": "full_attention",
        **lora,
    }


def test_hashes_that_are_no_integers_and_several_of_a_block_are_published(
    serve: Serve, attach: Attach
) -> None:
    node, prompt = serve(""), [1, 2, 3, 4]
    cache = attach(node)
    hashes = [bytes([at]) * 32 for at in range(4)]
    with router(endpoints(node)) as reads:
        store(cache, prompt, block_size=1, hash_bytes=32, hashes=b"".join(hashes))

        def published() -> set[bytes]:
            reads.replay(0)
            events = [event for batch in reads.batches.values() for event in batch[1]]
            return {one for event in events for one in event.get("block_hashes", ())}

        wait_until(lambda: published() == set(hashes), "all hashes of the blocks")
        partition = node.node.partitions[0]
        node.do(lambda: partition.delete(keys_of(prompt)))

        def removed() -> int:
            reads.replay(0)
            events = [event for batch in reads.batches.values() for event in batch[1]]
            gone = [event for event in events if event["type"] == "BlockRemoved"]
            return sum(len(event["block_hashes"]) for event in gone)

        wait_until(lambda: removed() == 2 * len(hashes), "they leave memory and disk")


def test_without_events_nothing_is_sent_or_kept(serve: Serve, attach: Attach) -> None:
    node = serve()
    cache = attach(node)
    assert not cache.wants_descriptions
    assert node.node.events is None
    assert node.do(lambda: node.node.partitions[0].on_move) is None


def test_models_with_addresses_of_their_own_do_not_mix(
    serve: Serve, attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    node = serve("one", "team-a/one", "two")
    caches = [attach(node, at) for at in range(3)]
    for at, (cache, model) in enumerate(zip(caches, ("one", "two", "three"), strict=True)):
        store(cache, [at, at], model=model)
    for at, model in enumerate(("one", "two")):
        with router(endpoints(node, model)) as reads:
            expected = {hash_of(key_of(at, at))}
            wait_until(partial(knows, reads, expected), "its own")
    with router(endpoints(node, "team-a/one")) as reads:
        assert not known(reads)[HOST], "no engine of this tenant"
    assert "no events of default/three: give --events three=ADDRESS" in caplog.text


def test_an_address_without_a_name_publishes_the_first_model_only(
    serve: Serve, attach: Attach
) -> None:
    node = serve("")
    caches = [attach(node, at) for at in range(2)]
    for cache, model in zip(caches, ("one", "two"), strict=True):
        store(cache, [1, 2], model=model)
    node.until(lambda: len(node.node.partitions) == 2)
    with router(endpoints(node)) as reads:
        wait_until(lambda: len(known(reads)[DISK]) == 1, "the first one")
        assert [each.on_move is None for each in node.node.partitions] == [False, True]


def test_newer_weights_of_a_model_take_its_address(serve: Serve, attach: Attach) -> None:
    node = serve("")
    old, new = (attach(node, at) for at in range(2))
    with router(endpoints(node)) as reads:
        store(old, [1, 2])
        wait_until(lambda: known(reads)[HOST] == {hash_of(key_of(1, 2))})
        store(new, [3, 4])
        wait_until(lambda: known(reads)[HOST] == {hash_of(key_of(3, 4))}, "and no old ones")
        store(old, [5, 6])
        store(new, [7, 8])
        wait_until(lambda: hash_of(key_of(7, 8)) in known(reads)[HOST])
        assert known(reads)[HOST] == {hash_of(key_of(3, 4)), hash_of(key_of(7, 8))}


def test_the_oldest_descriptions_are_forgotten_beyond_the_bound(
    serve: Serve, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_BYTES", 5 * 600)
    node = serve("")
    cache = attach(node)
    prompts = [[at, at + 1] for at in range(12)]
    with router(endpoints(node)) as reads:
        for prompt in prompts:
            store(cache, prompt)
        last = [hash_of(key_of(*prompt)) for prompt in prompts[-4:]]
        wait_until(lambda: known(reads)[HOST] >= set(last), "the newest ones")
        assert len(known(reads)[HOST]) < 8
        assert len(held(node)[HOST]) == 12


def test_changes_that_were_lost_are_published_when_blocks_are_described_again(
    serve: Serve, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, now = serve(""), [0.0]
    cache = attach(node, clock=lambda: now[0])
    with router(endpoints(node)) as reads:
        store(cache, [1, 2])
        wait_until(lambda: known(reads)[DISK], "it is published")
        assert not cache.undescribed([key_of(1, 2)])
        with monkeypatch.context() as patch:
            patch.setattr(block_events, "MAX_BLOCKS", 0)
            store(cache, [3, 4])
            wait_until(lambda: not known(reads)[HOST], "readers begin anew")
        now[0] = client.DESCRIBED_S + 1
        for prompt in [1, 2], [3, 4]:
            assert cache.undescribed(keys_of(prompt))
            cache.describe(keys_of(prompt), description(prompt, is_first=True))
        wait_until(lambda: len(known(reads)[HOST]) == 2, "both are published again")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": bytes(4)},
        {"hashes": bytes(9)},
        {"hashes": b""},
        {"hash_bytes": 0},
        {"block_size": 0},
        {"block_size": -1},
        {"parent": b"?"},
        {"keys": b""},
        {"keys": bytes(16)},  # twice the same
        {"keys": bytes(7)},
        {"extra_keys": bytes(3000)},
        {"group": -1},
        {"group": events.MAX_GROUPS},
    ],
)
def test_a_description_whose_parts_do_not_agree_ends_the_connection(
    serve: Serve, wrong: dict[str, Any]
) -> None:
    node = serve("")
    with bare(node.config.socket) as engine:
        number = engine.enter()
        right: dict[str, Any] = {"partition": number, "keys": bytes(range(16)), "is_first": True}
        engine.send(description([1, 2, 3, 4], **right))
        assert engine.ask(OpenRequest(5, b"s" * 32, BLOCK, 8)) is not None
        engine.send(description([1, 2, 3, 4], **{**right, **wrong}))
        assert engine.is_closed()


def test_extra_keys_stay_with_their_blocks_if_a_prompt_is_described_in_parts(
    serve: Serve, attach: Attach
) -> None:
    node, prompt = serve(""), [1, 2, 3, 4, 5, 6, 7, 8]
    cache = attach(node)
    extra = msgspec.msgpack.encode([["adapter"], ["adapter"]])
    keys = keys_of(prompt)
    store(cache, prompt, describes=False)
    for first in 0, 2:
        part = description(prompt[: 2 * first + 4], first, extra_keys=extra)
        cache.describe(keys[first : first + 2], part)
    with router(endpoints(node)) as reads:
        wait_until(lambda: len(known(reads)[DISK]) == 4, "all are published")
        for key in keys:
            event = event_of(reads, hash_of(key))
            assert event["extra_keys"] == [["adapter"]] * len(event["block_hashes"])


def test_extra_keys_that_are_no_list_are_left_out(serve: Serve, attach: Attach) -> None:
    node = serve("")
    cache = attach(node)
    with router(endpoints(node)) as reads:
        store(cache, [1, 2], extra_keys=b"\xc1")
        wait_until(lambda: known(reads)[DISK], "it is published")
        assert event_of(reads, hash_of(key_of(1, 2)))["extra_keys"] is None


def test_addresses_are_given_by_model() -> None:
    texts = ["tcp://a:1", "my/model=tcp://a:2,tcp://a:3,kv@a@m=1", "m=tcp://a:4,tcp://a:5"]
    assert parse_events(texts) == {
        "": EventsAddress("tcp://a:1"),
        "my/model": EventsAddress("tcp://a:2", "tcp://a:3", "kv@a@m=1"),
        "m": EventsAddress("tcp://a:4", "tcp://a:5"),
    }
    for wrong in ["tcp://a:1", "tcp://a:2"], ["m=5557"], ["m=tcp://a:1", "m=tcp://a:2"]:
        with pytest.raises(ConfigError, match=f"events: '{wrong[-1]}' has no address, or"):
            parse_events(wrong)


def test_no_tenant_publishes_at_an_address_of_another(serve: Serve) -> None:
    quota = {"team-a": TenantQuota(64 << 10)}
    node = serve("team-a/model", "model", "", quotas=quota)
    published = {}
    with ExitStack() as stack:
        for tenant, model, name in (
            ("team-a", "model", "team-a/model"),
            ("team-b", "team-a/model", ""),  # the first one without an address of its own
            ("team-c", "", None),
            ("team-c", "model", "model"),
            ("team-d", "model", None),  # it does not take what another has
            ("team-a", "other", None),
        ):
            engine = stack.enter_context(bare(node.config.socket))
            number = engine.enter(f"{tenant}-{model}", tenant)
            right: dict[str, Any] = {"partition": number, "model": model, "is_first": True}
            engine.send(description([1, 2], **right, keys=bytes(8)))
            assert engine.ask(OpenRequest(5, b"s" * 32, BLOCK, 8)) is not None
            if name is not None:
                published[name] = tenant
            addresses = node.node.events._addresses if node.node.events else {}
            found = {name: it.published for name, it in addresses.items()}
            assert {n: p.key.tenant for n, p in found.items() if p is not None} == published


def changes_of(description: DescribeNotice, num_keys: int) -> list[events.Change]:
    """Return a description, and the move of its blocks to memory, the last one first."""
    keys = PackedKeys(b"".join(at.to_bytes(8, "big") for at in range(num_keys)), 8)
    there = events.Described(0, keys, [HOST], bytes(num_keys), description)
    return [there, events.KeysMoved(0, list(keys)[::-1], HOST, False)]


def test_work_and_memory_grow_with_what_was_described(monkeypatch: pytest.MonkeyPatch) -> None:
    num, num_read = 500, [0]
    read = events._extra_keys

    def counting(content: bytes) -> list[object]:
        num_read[0] += len(content)
        return read(content)

    monkeypatch.setattr(events, "_extra_keys", counting)
    prompt = list(range(num * SIZE))
    extra_keys = msgspec.msgpack.encode([["x" * 500]] * num)
    described = description(prompt, keys=b"", extra_keys=extra_keys)
    keyed = events.KeyedEvents([HOST])
    found = list(keyed.of(changes_of(described, num)))
    assert len(found) == num, "they came in the wrong order"
    assert all(event["extra_keys"] == [["x" * 500]] for event in found)
    assert num_read[0] < 3 * len(extra_keys)
    assert not any(block.facts.num_bytes for block in keyed._known.values()), "what one may hold"
    assert keyed._num_bytes > len(extra_keys)


def test_events_and_batches_have_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 64)
    monkeypatch.setattr(publisher, "MAX_TOKENS", 40)
    num = 100
    described, moved = changes_of(description(list(range(num * SIZE))), num)
    assert isinstance(moved, events.KeysMoved)
    in_order = moved._replace(blocks=moved.blocks[::-1])
    batches = list(publisher._batches(events.KeyedEvents([HOST]).of([described, in_order])))
    sizes = [[len(event["token_ids"]) for event in batch] for batch in batches]  # type: ignore[arg-type]
    assert max(map(max, sizes)) == 16
    assert max(map(sum, sizes)) == 48
    assert sum(map(sum, sizes)) == num * SIZE


def test_texts_that_are_too_long_are_not_published(serve: Serve, attach: Attach) -> None:
    node = serve("")
    cache = attach(node)
    with router(endpoints(node)) as reads:
        store(cache, [3, 4], salt="s" * 2000)
        store(cache, [1, 2], salt="s" * 500)
        wait_until(lambda: known(reads)[DISK], "the other is published")
        assert known(reads)[HOST] == {hash_of(key_of(1, 2))}


def test_moves_of_another_room_are_not_published() -> None:
    described, moved = changes_of(description([1, 2, 3, 4]), 2)
    assert isinstance(moved, events.KeysMoved)
    keyed = events.KeyedEvents([HOST])
    assert not list(keyed.of([described, moved._replace(room=1)]))
    assert list(keyed.of([moved]))
