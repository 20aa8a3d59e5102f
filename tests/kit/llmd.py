"""A reader of block events as llm-d's precise prefix cache reads them, by its published format.

It follows what llm-d-router of August 2026 does with events of vLLM: which fields it reads, which
events it drops, how it names blocks, and how it scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

BlockName = int
"""Name of a block by model, tokens and extra keys of its whole prefix."""

STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
REMOVED = ("block_hashes", "medium", "group_idx")
"""Fields in the order of events that are arrays; those behind them are not read."""
DEFAULT_WEIGHTS = {"gpu": 1.0, "cpu": 0.8}
UNLISTED = 1.0
"""Weight of a medium that the configuration does not list."""


class LlmdIndex:
    """Blocks of all pods. weights: by medium. block_size: tokens, independent of the engines'."""

    def __init__(self, block_size: int, weights: Mapping[str, float] = DEFAULT_WEIGHTS) -> None:
        self._size = block_size
        self._weights = weights
        self._places: dict[BlockName, set[tuple[str, str]]] = defaultdict(set)
        self._names: dict[int, list[BlockName]] = {}  # by the engine's hash
        self._stores: dict[tuple[str, str, int], int] = defaultdict(int)
        self.num_dropped = 0

    def read(self, frames: Sequence[bytes]) -> None:
        """Take in a message of three frames: topic, number, batch."""
        topic, number, payload = frames
        assert len(number) == 8
        parts = topic.decode().split("@")
        pod, model = parts[1:] if len(parts) == 3 else (topic.decode(), "")
        _time, events, *_rank = msgspec.msgpack.decode(payload)
        for event in events:
            self._take(pod, model, *_fields(event))

    def _take(self, pod: str, model: str, kind: str, event: dict[str, Any]) -> None:
        if kind == "AllBlocksCleared":
            for places in self._places.values():
                places -= {place for place in places if place[0] == pod}
            for scope in [scope for scope in self._stores if scope[0] == pod]:
                del self._stores[scope]
            return
        assert kind in ("BlockStored", "BlockRemoved"), "it drops the whole batch"
        hashes = [_number(each) for each in event["block_hashes"]]
        medium = (event["medium"] or "gpu").lower()
        if kind == "BlockStored":
            self._store(pod, medium, event["lora_name"] or model, hashes, event)
            return
        for each in hashes:
            scope = (pod, medium, each)
            self._stores[scope] -= 1
            if self._stores[scope] <= 0:  # as often as it was stored
                del self._stores[scope]
                for name in self._names.get(each, ()):
                    self._places[name].discard((pod, medium))

    def _store(
        self, pod: str, medium: str, model: str, hashes: list[int], event: dict[str, Any]
    ) -> None:
        tokens, parent = event["token_ids"], event["parent_block_hash"]
        assert isinstance(tokens, list)
        assert isinstance(event["block_size"], int)
        before: BlockName | None = None
        if parent:
            if _number(parent) not in self._names:
                self.num_dropped += 1
                return
            before = self._names[_number(parent)][-1]
        num = len(tokens) // self._size
        if num:
            extra = _realigned(event["extra_keys"], num)
            names = list(self._chain(model, tokens, extra, before))
            most = max(num, len(hashes))
            made: dict[int, list[BlockName]] = defaultdict(list)
            for at in range(most):
                made[hashes[at * len(hashes) // most]].append(names[at * num // most])
            self._names.update(made)
        else:
            if tokens:
                self.num_dropped += 1
                return
            names = [self._names[each][0] for each in hashes if each in self._names]
        for name in names:
            self._places[name].add((pod, medium))
        for each in hashes if names else ():
            self._stores[pod, medium, each] += 1

    def _chain(
        self,
        model: str,
        tokens: Sequence[int],
        extra: Sequence[Sequence[str]],
        before: BlockName | None = None,
    ) -> Iterator[BlockName]:
        name = hash(model) if before is None else before
        for at in range(len(tokens) // self._size):
            block = tuple(tokens[at * self._size : (at + 1) * self._size])
            name = hash((name, block, tuple(extra[at])))
            yield name

    def scores(self, model: str, prompt: Sequence[int], salt: str = "") -> dict[str, float]:
        """Return the score of each pod: the weights of the prompt's first blocks, added up."""
        num = len(prompt) // self._size
        extra = [[salt] if salt and not at else [] for at in range(num)]
        found: dict[str, float] = {}
        active: set[str] = set()
        for at, name in enumerate(self._chain(model, prompt, extra)):
            best: dict[str, float] = {}
            for pod, medium in self._places.get(name, ()):
                weight = self._weights.get(medium, UNLISTED)
                best[pod] = max(weight, best.get(pod, 0.0))
            active = active & set(best) if at else set(best)
            for pod in active:
                found[pod] = found.get(pod, 0.0) + best[pod]
        return found


def _fields(event: list[Any] | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the kind of an event and the fields that are read, with None for missing ones."""
    if isinstance(event, dict):
        kind, given = event["type"], event
    else:
        kind, *values = event
        given = dict(zip(STORED if kind == "BlockStored" else REMOVED, values, strict=False))
    names = {"BlockStored": STORED, "BlockRemoved": REMOVED}.get(kind, ())
    return kind, {name: given.get(name) for name in names}


def _number(engine_hash: int | bytes) -> int:
    if isinstance(engine_hash, bytes):
        return int.from_bytes(engine_hash[-8:], "big")
    return engine_hash & (2**64 - 1)


def _realigned(extra_keys: list[list[Any] | None] | None, num: int) -> list[list[str]]:
    """Return the texts among the extra keys of each block of the index."""
    given = [[key for key in keys or () if isinstance(key, str)] for keys in extra_keys or ()]
    found: list[list[str]] = [[] for _ in range(num)]
    if len(given) >= num:
        for at, keys in enumerate(given):
            found[at * num // len(given)] += keys
    elif given:
        found = [given[at * len(given) // num] for at in range(num)]
    return found
