"""One contestant of `benchmarks.micro.index`, in a process and an environment of its own.

Reads a JSON object per line, {"do": "hit", "start": 0, "stop": 500}, makes these calls one after
the other, and prints their microseconds and the number of wrong results. It does not need kvtier:
SGLang's environment has the standard library, numpy and torch.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import time
import types
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.peers.lines import serve, take_stdout

VOCABULARY = 128_000
NUM_MISSES = 200
Tokens = array  # of "q", as SGLang wants them


class Index(ABC):
    """A prefix index, and how its users call it. Lengths are in tokens."""

    @abstractmethod
    def insert(self, tokens: Tokens, slots: list[int], number: int) -> int:
        """Insert a prompt, one slot per block. Return the length of the prefix that was present."""

    @abstractmethod
    def match(self, tokens: Tokens) -> int:
        """Return the length of a prompt's cached prefix."""

    @abstractmethod
    def slots(self, tokens: Tokens) -> object:
        """Return the slots of a prompt's cached prefix, in the form that the index returns."""

    @abstractmethod
    def blocks(self, slots: object) -> list[int]:
        """Return a slot per block from ``slots``. Not timed."""

    @abstractmethod
    def evict(self, num_tokens: int) -> int:
        """Evict the least recently used tokens. Return how many."""

    def facts(self) -> dict[str, float]:
        """Return figures of the index's memory, after all prompts were inserted."""
        return {}


class Kvtier(Index):
    """The native index or its twin, through the calls that the cache makes."""

    def __init__(self, name: str, page: int) -> None:
        from kvtier.core import keys
        from kvtier.index import native_index, python_index
        from kvtier.index.policies import LruPolicy

        if name == "native":
            self.index = native_index.NativeIndex({"device": "lru", "host": "lru"})
        else:
            self.index = python_index.PythonIndex({"device": LruPolicy(), "host": LruPolicy()})
        self.page, self.labels = page, keys.view_labels

    def insert(self, tokens: Tokens, slots: list[int], number: int) -> int:
        labels = self.labels(tokens, self.page)
        made = self.index.insert(b"model", labels, "device", slots, float(number))
        return (len(made.blocks) - made.num_new) * self.page

    def match(self, tokens: Tokens) -> int:
        labels = self.labels(tokens, self.page)
        return self.index.match(b"model", labels).num_blocks * self.page

    def slots(self, tokens: Tokens) -> object:
        return self.index.match_slots(b"model", self.labels(tokens, self.page), "device")

    def blocks(self, slots: object) -> list[int]:
        return slots.tolist()

    def evict(self, num_tokens: int) -> int:
        return len(self.index.drop("device", num_tokens // self.page)) * self.page

    def facts(self) -> dict[str, float]:
        if not hasattr(self.index, "num_bytes"):
            return {"blocks": len(self.index)}
        num_bytes = self.index.num_bytes
        return {"blocks": len(self.index), "bytes_per_block": num_bytes / len(self.index)}


class Sglang(Index):
    """SGLang's tree: the unified one over its Rust core, or the plain one in Python.

    Its allocator is left out: freeing slots does nothing. SGLang has a slot per token, so a block
    has a run of slots.
    """

    def __init__(self, name: str, page: int) -> None:
        stand_in_for_torchvision()
        import torch
        from sglang.srt.mem_cache import base_prefix_cache
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        torch.set_num_threads(1)
        self.page, self.base, self.torch = page, base_prefix_cache, torch
        common = {
            "disable": False,
            "req_to_token_pool": None,
            "token_to_kv_pool_allocator": NoAllocator(torch.device("cpu")),
            "page_size": page,
        }
        self.key: Callable[[Tokens], object] = RadixKey
        if name == "sglang rust":
            from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
            from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

            parts = {"tree_components": (ComponentType.FULL,), "tree_core_backend": "rust"}
            self.tree = UnifiedRadixCache(CacheInitParams(**common, **parts))
            core = type(self.tree.tree_core).__name__
            assert core.startswith("Rust"), f"asked for the Rust core, got {core}"
            self._evict = self.tree._evict
        else:
            self.tree = RadixCache(CacheInitParams(**common))
            self._evict = self.tree.evict

    def insert(self, tokens: Tokens, slots: object, number: int) -> int:
        made = self.base.InsertParams(key=self.key(tokens), value=slots)
        return self.tree.insert(made).prefix_len

    def match(self, tokens: Tokens) -> int:
        asked = self.base.MatchPrefixParams(key=self.key(tokens))
        return self.tree.match_prefix(asked).device_prefix_len

    def slots(self, tokens: Tokens) -> object:
        asked = self.base.MatchPrefixParams(key=self.key(tokens))
        found = self.tree.match_prefix(asked)
        return self.tree.path_device_indices(found.last_device_node)

    def blocks(self, slots: object) -> list[int]:
        return [slot // self.page for slot in slots[:: self.page].tolist()]

    def evict(self, num_tokens: int) -> int:
        return self._evict(self.base.EvictParams(num_tokens=num_tokens)).num_tokens_evicted


class NoAllocator:
    """Stands in for SGLang's allocator, and frees nothing."""

    def __init__(self, device: object) -> None:
        self.device = device

    def free(self, slots: object, start_pos: int = 0) -> None:
        """Do nothing, because nothing is allocated."""

    free_segment = free_full_segment = free

    def available_size(self) -> int:
        return 0

    def get_kvcache(self) -> None:
        return None

    def mamba_full_cache_donor(self) -> None:
        return None


def stand_in_for_torchvision() -> None:
    """Put a stand-in for torchvision into ``sys.modules``.

    SGLang's config modules import torchvision and never call it. The real one would change torch.
    """

    class Kind(type):
        def __getattr__(cls, name: str) -> str:
            return name

    class Anything(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return Kind(name, (), {"__init__": lambda self, *_, **__: None})

    names = ("", ".transforms", ".transforms.functional", ".transforms.v2", ".io", ".ops")
    names += (".transforms.v2.functional",)
    for name in names:
        module = Anything("torchvision" + name)
        module.__path__ = []
        module.__version__ = "0.0"
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    for name in names[1:]:
        parent, _, child = ("torchvision" + name).rpartition(".")
        setattr(sys.modules[parent], child, sys.modules["torchvision" + name])


def prompts(num: int, length: int, seed: int = 0) -> list[Tokens]:
    """Return prompts in groups of 100 that share their first half."""
    rng = np.random.default_rng(seed)
    made: list[Tokens] = []
    group = min(100, num)
    for _ in range(num // group):
        head = rng.integers(0, VOCABULARY, length // 2)
        for _ in range(group):
            tail = rng.integers(0, VOCABULARY, length - length // 2)
            made.append(array("q", np.concatenate([head, tail]).tobytes()))
    return made


class Contest:
    """All phases of the workload, a few calls at a time."""

    def __init__(self, index: Index, num: int, length: int, page: int) -> None:
        self.index, self.length, self.page = index, length, page
        self.prompts = prompts(num, length)
        self.per_prompt = length // page
        self.group = min(100, num)
        self.order = list(range(num))
        Random(1).shuffle(self.order)
        self.strangers = [
            array("q", (token + 1_000_000 for token in prompt))
            for prompt in prompts(NUM_MISSES, length, seed=9)
        ]
        self.rss_before = rss_bytes()

    def run(self, phase: str, start: int, stop: int) -> dict[str, object]:
        calls = [self.call(phase, number) for number in range(start, stop)]
        gc.collect()
        gc.disable()
        taken: list[float] = []
        results: list[object] = []
        clock = time.perf_counter
        cpu = time.process_time()
        for function, arguments, _ in calls:
            began = clock()
            result = function(*arguments)
            taken.append(1e6 * (clock() - began))
            results.append(result)
        cpu = time.process_time() - cpu
        gc.enable()
        wrong = sum(
            not is_right(result) for result, (_, _, is_right) in zip(results, calls, strict=True)
        )
        return {"us": taken, "cpu_s": cpu, "wrong": wrong}

    def call(
        self, phase: str, number: int
    ) -> tuple[Callable[..., object], tuple[object, ...], Callable[[object], bool]]:
        """Return the function to call, its arguments, and a check of the result."""
        shuffled = self.order[number % len(self.order)]
        prompt, half = self.prompts[shuffled], self.length // 2 // self.page * self.page
        whole = self.per_prompt * self.page
        if phase == "insert":
            known = 0 if number % self.group == 0 else half
            arguments = (self.prompts[number], self.given(number), number)
            return self.index.insert, arguments, lambda there: there == known
        if phase == "hit":
            return self.index.match, (prompt,), lambda there: there == whole
        if phase == "hit+slots":
            expected = self.expected(shuffled)
            return (
                self.index.slots,
                (prompt,),
                lambda slots: self.index.blocks(slots) == expected,
            )
        if phase == "half":
            mixed = prompt[:half] + self.strangers[number % NUM_MISSES][: self.length - half]
            return self.index.match, (mixed,), lambda there: there == half
        if phase == "miss":
            return self.index.match, (self.strangers[number % NUM_MISSES],), lambda n: n == 0
        assert phase == "evict", phase
        return self.index.evict, (8192,), lambda gone: gone >= 8192

    def given(self, number: int) -> object:
        """Return new slots for a prompt: one per block, or per token for SGLang."""
        first = number * self.per_prompt
        if isinstance(self.index, Sglang):
            torch = self.index.torch
            return torch.arange(first * self.page, (first + self.per_prompt) * self.page)
        return list(range(first, first + self.per_prompt))

    def expected(self, number: int) -> list[int]:
        """Return the expected slots. Those of the first half are the group's first prompt's."""
        first, head = number // self.group * self.group, self.length // 2 // self.page
        return [
            (first if block < head else number) * self.per_prompt + block
            for block in range(self.per_prompt)
        ]

    def do(self, do: str, **numbers: int) -> Mapping[str, object]:
        """Run some calls of a phase, or return the facts."""
        return self.facts() if do == "facts" else self.run(do, **numbers)

    def facts(self) -> dict[str, float]:
        return {"rss_bytes": rss_bytes() - self.rss_before, **self.index.facts()}


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", required=True)
    parser.add_argument("--num", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--page", type=int, required=True)
    options = parser.parse_args()
    kind = Sglang if options.index.startswith("sglang") else Kvtier
    answers = take_stdout()
    contest = Contest(kind(options.index, options.page), options.num, options.length, options.page)
    serve(answers, {"ready": True}, contest.do)


if __name__ == "__main__":
    main()
