"""Calls the native core with arbitrary arguments: ``-m tests.native.hostile SEED NUM``.

Each call must end and return a result, or raise one of ``REFUSALS``. It runs in a process of its
own, because a fault in the core ends the process. The last printed line is the call that did.
"""

# mypy: disable-error-code="arg-type,assignment,call-arg"

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

if core := os.environ.get("KVTIER_SANITIZED_CORE"):  # as the tests themselves have it
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "native" / "sanitizers"))
    __import__("use_core")

from kvtier import _native
from kvtier.core.keys import Labels
from kvtier.core.types import Match
from kvtier.index import State
from kvtier.node.wire.protocol import (
    CommitNotice,
    LookupRequest,
    ReleaseNotice,
    ReserveRequest,
    frame,
    pack,
)

REFUSALS = (
    TypeError,
    ValueError,
    KeyError,
    AssertionError,
    OverflowError,
    MemoryError,
    _native.NativeError,
)
TIERS = ("device", "host")
EDGES = (2**8, 2**16, 2**31, 2**32, 2**52, 2**62, 2**63, 2**64, 2**65)
TIMES = (0.0, 1.0, -1.0, 1e300, float("nan"), float("inf"), float("-inf"), 2**63, -0.0, "1", None)

MESSAGES = (
    frame(LookupRequest(1, 7, b"aba"))[4:],
    frame(ReserveRequest(1, 7, b"abcxyzx"))[4:],
    frame(CommitNotice(7, pack([0, 1, 2, 3]), pack([0, 1, 2, 3])))[4:],
    frame(CommitNotice(7, pack([3, 3, 2**40]), pack([0, 1, 2**40])))[4:],
    frame(LookupRequest(2**63, 0, bytes(300), True, False))[4:],
    frame(ReleaseNotice(7, pack([0, 1, 1, -1, 2**50])))[4:],
    frame(ReleaseNotice(0, b""))[4:],
)
Call = Callable[[], object]


class Hostile:
    """Makes calls with random arguments.

    The caller knows real memory only by ``arena``: every address that may be accessed lies in it,
    or is refused.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.arena = np.zeros(1 << 16, np.uint8)
        self.trie = self._new_trie()
        self.keyed = _native.KeyIndex(TIERS, ("lru", "runs"), tuple(State), 0)
        self.leases = self._sound_leases()
        self.keys = np.zeros(8, "V32")
        self.slot_table = _native.SlotTable(self.keys, np.arange(8))
        self.key_table = _native.KeyTable(self.keys, np.arange(8))
        self.policy = _native.PolicyReplay("runs", 9)
        self.fd = os.memfd_create("hostile")
        os.write(self.fd, bytes(1 << 16))
        self.ring: _native.UringRing | None = None

    # -- arguments ---------------------------------------------------------------------------------

    def number(self) -> Any:
        """Return a small valid number, one at the limit of some type, or no number."""
        kind = self.random.randrange(12)
        if kind < 6:
            return self.random.randrange(12)
        if kind < 10:
            return self.random.choice(EDGES) * self.random.choice((1, 1, -1)) + (
                self.random.randrange(-3, 4)
            )
        return self.random.choice((-1, 1.5, None, "7", b"7", True, np.int64(3), float("nan")))

    def word(self) -> int:
        """Return a number of 64 bits."""
        return int(np.random.default_rng(self.random.randrange(2**32)).choice(
            np.array([0, 1, 4096, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1], np.uint64)
        ))  # fmt: skip

    def numbers(self) -> Any:
        """Return a sequence of blocks or slots."""
        made = [self.number() for _ in range(self.random.randrange(5))]
        if self.random.random() < 0.7:
            made = [each for each in made if type(each) is int and 0 <= each < 2**32]
            if self.random.random() < 0.5:
                return _native.Numbers(made)[self.random.randrange(3) :]
        return self.random.choice((list, tuple, iter, np.array if not made else list))(made)

    def blocks(self) -> Any:
        """Return blocks, mostly existing ones."""
        if self.random.random() < 0.3:
            return self.numbers()
        known = [each[0] for each in self.trie.dump() if each[1] is not None]
        some = self.random.sample(known, min(len(known), self.random.randrange(6)))
        return self.random.choice((list, _native.Numbers))(some)

    def labels(self) -> Any:
        kind = self.random.randrange(4)
        if kind == 0:
            return [self.random.choice((b"", b"a", b"b" * 9, "a", None)) for _ in range(3)]
        tokens: Any = bytes(self.random.randrange(80))
        if kind == 1:
            dtype = self.random.choice("iIqQhd")
            tokens = np.zeros(self.random.randrange(20), dtype)[:: self.random.choice((1, 1, 2))]
        sound = self.random.random() < 0.4
        fields = (
            (self.random.choice((4, 8)), 1, 0, 2) if sound else (self.number() for _ in range(4))
        )
        return Labels(tokens, *fields)

    def array(self) -> Any:
        """Return an array for addresses or sizes, of some type, shape and order."""
        dtype = self.random.choice((np.uint64,) * 4 + (np.int64, np.uint32, np.float64, ">u8", "O"))
        shape = self.random.choice(((3,),) * 4 + ((0,), (), (2, 2), (1,)))
        made: Any = np.zeros(shape, dtype)
        if made.dtype == np.uint64:
            made.flat = [self.word() for _ in range(made.size)]
        return self.random.choice((made, made, made, made[::-1] if made.ndim else made, None, 5))

    def place(self, num_bytes: int) -> int:
        """Return an address in the arena with ``num_bytes`` behind it."""
        return int(self.arena.ctypes.data) + self.random.randrange(len(self.arena) - num_bytes)

    # -- calls -------------------------------------------------------------------------------------

    def _new_trie(self) -> _native.BlockTrie:
        return _native.BlockTrie(TIERS, ("lru",) * len(TIERS), tuple(State), Labels, Match)

    def constructor(self) -> Call:
        tuples = [TIERS, ("lru",) * len(TIERS), tuple(State)]
        at = self.random.randrange(4)
        wrong = self.random.choice(
            ((), (None,) * 2, (5, "x"), (-1,), (2**63,), ("lru",) * 99, 7, ("\ud800", "lru"))
        )
        if at < 3:
            tuples[at] = wrong
        match_type = self.random.choice((5, None, int, type, "x")) if at == 3 else Match

        def make() -> None:
            trie = _native.BlockTrie(*tuples, Labels, match_type)
            trie.match(b"n", [b"a"])

        return make

    def of_trie(self) -> Call:
        """Return a call of some method of the trie."""
        trie, pick = self.trie, self.random.choice
        space = pick((b"n", b"n", b"m", b"", None, "n"))
        tier = pick((*TIERS, *TIERS, "tape", None, 3))
        group = pick((0, 1, 2, 3, -1, None, 2**63, 2**64, "1"))
        tier = pick((tier, tier, (tier, group), (tier,)))
        labels, now, after = self.labels(), pick(TIMES), pick((None, None, self.number()))
        slots = [self.random.randrange(2**32) for _ in range(2)]
        if self.random.random() < 0.3:
            slots = self.numbers()
        calls: dict[str, tuple[Any, ...]] = {
            "match": (space, labels),
            "match_slots": (space, labels, tier),
            "state": (self.number(), tier),
            "states": (space, labels, tier, after),
            "states_of": (self.blocks(), tier),
            "slots": (self.blocks(), tier),
            "prefixes": (self.blocks(), tier),
            "num_uses": (self.number(),),
            "num_uses_of": (self.blocks(),),
            "num_evictable": (tier,),
            "extend": (space, labels, after),
            "insert": (space, labels, tier, slots, now, after, pick((True, False))),
            "begin_write": (self.blocks(), tier, slots),
            "commit": (self.blocks(), tier, now),
            "abort": (self.blocks(), tier),
            "touch": (self.blocks(), now),
            "lease": (self.blocks(), tier),
            "release": (self.blocks(), tier),
            "evict": (tier, self.number()),
            "drop": (tier, self.number()),
            "forget": (self.blocks(), tier),
            "keep": (self.blocks(), tier),
            "lose": (self.number(), tier),
            "origin": (self.number(),),
            "names": (self.blocks(),),
            "missing_keys": (self.number(),),
            "set_keys": (
                self.blocks(),
                pick(([b"k" * 32], [b"k"], [None], 5, self.keys_side_by_side())),
            ),
        }
        name = pick(list(calls))
        return self.named(name, lambda: getattr(trie, name)(*calls[name]), calls[name])

    def keys_side_by_side(self) -> Any:
        """Some of them were never made."""
        kind, num = _native.Keys, self.random.randrange(5)
        return self.random.choice((kind.__new__(kind), kind([b"k" * 32] * num)[1:]))

    def of_packed(self) -> Call:
        """Exercise numbers and keys side by side, and parts of them."""
        pick, number = self.random.choice, self.number
        kind = pick((_native.Numbers, _native.Keys))
        items = pick((self.numbers(), [number()], [b"k" * 32] * 3, ["k"], None, 5, np.arange(3)))
        part = slice(pick((None, number())), pick((None, number())), pick((None, number())))

        def make() -> None:
            packed = pick((kind, kind.joined, lambda some: kind.__new__(kind)))(items)
            for at in (part, part.start):
                with suppress(*REFUSALS, IndexError):
                    packed[at], memoryview(packed[at]), packed[at] == items
            packed.index(number()), packed.count(items), repr(packed[:9])
            _native.Numbers.counted(number(), pick((12, -1, 2**62, 2**65, None)))

        return self.named("packed", make, (kind, type(items), part))

    def of_keys(self) -> Call:
        """Return a call of some method of the flat table."""
        index, pick = self.keyed, self.random.choice
        tier = pick((*TIERS, *TIERS, "tape", None, 3, (TIERS[0], 0), (TIERS[0], 1)))
        packed = np.array([b"a", b"b", b"a"], "V1")
        lists = ([b"a", b"b"], [b"c"] * 2, [b"", b"long"], [None], 5, ())
        keys = pick((*lists, packed, packed[::2], packed.view(np.uint8), np.zeros(3, "V0")))
        known = [each[0] for each in index.dump()]
        some = self.random.sample(known, min(len(known), self.random.randrange(4)))
        array = np.array(some, np.int64)
        blocks = pick((some, some, array, array[::2], array.view(np.uint64), self.numbers()))
        slots = pick(([self.random.randrange(2**32) for _ in some], self.numbers()))
        calls: dict[str, tuple[Any, ...]] = {
            "find": (keys,),
            "missing": (keys, tier),
            "hashes": (blocks,),
            "in_slots": (slots, tier),
            "expect": (pick((0, 7, 5_000, -1, 2**32, 2**63, 2**64, None, "7", 1.5)),),
            "make": (keys,),
            "states_of": (blocks, tier),
            "slots": (blocks, tier),
            "keys": (blocks,),
            "num_uses": (self.number(),),
            "num_uses_of": (blocks,),
            "num_leases": (self.number(), tier),
            "depth": (self.number(),),
            "set_depths": (blocks, slots),
            "num_evictable": (tier,),
            "begin_write": (blocks, tier, slots),
            "commit": (blocks, tier),
            "abort": (blocks, tier),
            "touch": (blocks,),
            "lease": (blocks, tier),
            "release": (blocks, tier),
            "evict": (tier, self.number()),
            "forget": (blocks, tier),
            "keep": (blocks, tier),
            "lose": (self.number(), tier),
            "order": (tier,),
            "write_new": (keys, tier, slots),
            "commit_prompt": (blocks, slots, tier),
            "facts": (blocks,),
            "check_invariants": (),
        }
        name = pick(list(calls))
        return self.named(name, lambda: getattr(index, name)(*calls[name]), calls[name])

    def of_leases(self) -> Call:
        """Return a call of some method of the leases of an engine."""
        pick, index = self.random.choice, self.keyed
        known = [each[0] for each in index.dump()]
        slots = pick((np.arange(9), np.array([-1, 2**40, 3, 3]), np.zeros(0, np.int64), [1], None))
        message = pick(MESSAGES)[: pick((None, None, self.random.randrange(40)))]
        if self.random.random() < 0.3:
            at = self.random.randrange(len(message) + 1)
            message = message[:at] + bytes([self.random.randrange(256)]) + message[at + 1 :]
        free = _native.FreeSlots(5)
        free.open(0, 5)
        segments: tuple[Any, ...] = (
            *(((free, 0),), ((free, 0),), ((free, 0), (free, 0)), ((free, 3),), (), (1,)),
            *(None, 1, []),
        )
        calls: dict[str, tuple[Any, ...]] = {
            "admits": (self.number(),),
            "lease": (pick((known, self.numbers())), pick(TIMES)),
            "release": (slots,),
            "reserve": (pick((self.numbers(), [0, 7], slots)),),
            "end_reserved": (slots,),
            "serve": (message, pick((0, 7)), pick((1, 1, 3, 0, 2**63)), pick((True, False)), 0.0),
            "serve_reserve": (
                message,
                pick((7, 7, 0)),
                pick((1, 1, 3, 0, 2**63)),
                pick(segments),
                pick((None, lambda *_: pick(segments), self._admit_some, self._reserve_again)),
                pick((0, 1, 2**63)),
                pick((True, False)),
                pick(TIMES),
            ),
            "serve_commit": (message, pick((7, 7, 0))),
        }
        name = pick(list(calls))

        def call() -> None:
            if self.random.random() < 0.1:
                self.leases = self._new_leases()
            getattr(self.leases, name)(*calls[name])

        return self.named(name, call, calls[name])

    def _admit_some(self, num_new: int, ready: Any) -> Any:
        """Make room for a reservation, with other calls meanwhile."""
        self.leases.admits(self.random.randrange(4))
        self.keyed.release(ready, TIERS[0])
        free = _native.FreeSlots(8)
        free.open(0, num_new)
        return ((free, 0),)

    def _reserve_again(self, *_: Any) -> Any:
        """Make no room, but call others that use the same memory of the core."""
        self.keyed.evict(TIERS[0], 1)
        for message in MESSAGES:
            self.leases.serve(message, 7, 1, True, 0.0)
            served = self.leases.serve_reserve(message, 7, 1, (), lambda *_: None, 0, False, 0.0)
            assert served is None
        return None

    def _sound_leases(self) -> _native.SlotLeases:
        """Return valid leases on eight slots."""
        dtypes = (np.int64, np.int8, np.int64, np.uint64, np.float64, bool)
        arrays = [np.ones(8, dtype) for dtype in dtypes]
        counts, is_reserved = np.zeros(8, np.uint32), np.zeros(8, bool)
        return self.keyed.slot_leases(TIERS[0], (*arrays, 512, 4096), counts, is_reserved, 1, 6)

    def _new_leases(self) -> _native.SlotLeases:
        """Return leases on eight slots, or on arrays that do not fit."""
        pick = self.random.choice
        sizes = [pick((8,) * 30 + (7, 0)) for _ in range(6)]
        dtypes = (np.int64, np.int8, np.int64, np.uint64, np.float64, bool)
        arrays: list[Any] = [np.zeros(*each) for each in zip(sizes, dtypes, strict=True)]
        arrays[0] += 1
        arrays += [pick((512, 512, 2**60, 0, -1)), pick((4096, 4096, 1, 0))]
        if self.random.random() < 0.05:
            arrays[pick(range(8))] = pick((None, 5, np.zeros((2, 2)), bytes(64)))
        counts = np.zeros(pick((8,) * 9 + (3,)), pick((np.uint32,) * 9 + (np.uint8,)))
        return self.keyed.slot_leases(
            pick(TIERS), tuple(arrays), counts, np.zeros(8, bool), 1, 2**64 - 2
        )

    def of_tables(self) -> Call:
        """A call of a table of keys, or of one of slots whose keys change while they are listed."""
        pick, keys = self.random.choice, self.keys[:: self.random.choice((1, 1, 2, -1))]
        slots = np.array([pick((*range(9), -1, 2**32, 2**63 - 1)) for _ in range(3)], np.int64)
        some = pick((slots % 8, slots % 8, slots, slots.astype(np.int32), [1], None, slots[:0]))
        given = pick((keys[:3], keys[:3], keys[:2], self.array(), b"k" * 96, None))
        if pick((True, False)):
            self.keys.view(np.uint8)[:] = self.random.randrange(3)
        if self.random.random() < 0.1:

            def make() -> None:
                self.slot_table = _native.SlotTable(keys, some)
                self.key_table = _native.KeyTable(given, some)

            return self.named("tables", make, (some,))
        calls: list[tuple[Any, str, tuple[Any, ...]]] = [
            (self.slot_table, pick(("put", "remove")), (some,)),
            (self.slot_table, "find", (given,)),
            (self.key_table, pick(("put", "remove")), (given, some)),
            (self.key_table, "find", (given,)),
            (_native, "free_rows", (pick((some, self.numbers())), self.array(), self.array())),
        ]
        table, name, arguments = pick(calls)
        return self.named(name, lambda: getattr(table, name)(*arguments), arguments)

    def of_policies(self) -> Call:
        """A policy that is replayed: keys of a few prompts, and any time."""
        if self.random.random() < 0.2:
            name = self.random.choice(("runs", "lru", "arc", "s3fifo", "lfuda", "sieve", "", None))
            sizes = (self.random.choice((1, 5, 50)), self.number())
            arguments = (name, self.random.choice(sizes), self.number(), self.number())

            def make() -> None:
                self.policy = _native.PolicyReplay(*arguments)

            return self.named("policy", make, arguments)
        length = self.random.randrange(70)
        keys = np.arange(length, dtype=np.uint64) * np.uint64(self.random.randrange(4))
        given = self.random.choice((keys, keys, keys, keys, self.array()))
        now = self.random.choice((*range(50), *TIMES))

        def ask() -> None:
            self.policy.request(given, now)
            self.policy.check_invariants()

        return self.named("request", ask, (now,))

    def of_memory(self) -> Call:
        """Return a copy or a checksum with at most one invalid argument."""
        sizes = np.array([self.random.randrange(300) for _ in range(3)], np.uint64)
        src = np.array([self.place(300) for _ in range(3)], np.uint64)
        # A destination for each fragment, and none of them what another one reads.
        half = np.zeros(900, np.uint8)
        dst = np.arange(3, dtype=np.uint64) * np.uint64(300) + np.uint64(half.ctypes.data)
        names = (
            "copy_batch",
            "copy_checked",
            "crc32c_many",
            "crc32c",
            "crc32c_table",
            "receive_values",
            "rows",
        )
        name = self.random.choice(names)
        arguments: list[Any]
        if name == "copy_batch":
            arguments = [dst, src, sizes, 2]
        elif name == "copy_checked":
            arguments = [dst, src, sizes, 3]
        elif name == "crc32c_many":
            arguments = [src, sizes, 2]
        elif name == "receive_values":  # from no socket, so that nothing comes
            arguments = [-1, b"$9\r\n", b"", dst, sizes, 3, 1, 0, 1.0]
        elif name == "rows":
            width = self.random.randrange(9)
            rows = self.arena[: 8 * 9].reshape(8, 9)[:: self.random.choice((1, -1, 3)), :width]
            wrong = [
                rows.T,
                rows[0],
                rows.view(np.int8),
                None,
                5,
                np.broadcast_to(rows, (2, *rows.shape)),
            ]
            given = self.random.choice([rows, *wrong])
            return self.named(name, lambda: _native.crc32c_rows(given), (type(given),))
        else:
            arguments = [int(src[0]), int(sizes[0]), 0]
        at = self.random.randrange(len(arguments))
        if isinstance(arguments[at], np.ndarray):
            arguments[at] = self.unsound(arguments[at])
        else:
            arguments[at] = self.unsound_number(at, arguments)
        function = getattr(_native, name)
        return self.named(name, lambda: (function(*arguments), half), arguments)

    def unsound(self, array: Any) -> Any:
        """Another array, or this one with a number that leads out of memory."""
        if self.random.random() < 0.5:
            other = self.array()
            is_plain = isinstance(other, np.ndarray) and other.dtype == np.uint64
            return other if not is_plain or other.shape != array.shape else array
        made = array.copy()
        made[self.random.randrange(len(made))] = self.random.choice(
            (0, 2**63 + 5, 2**64 - 1, 2**64 - 4096)
        )
        return made

    def unsound_number(self, at: int, arguments: list[Any]) -> Any:
        """Return an invalid thread count, address or size; never an address of other memory."""
        wrong = self.random.choice((-1, 2**63, 2**64 - 1, 2**64, 2**70, None, 1.5, "3"))
        return 0 if at == 0 and len(arguments) == 3 and self.random.random() < 0.3 else wrong

    def of_ring(self) -> Call:
        """io_uring, where it can be had: the kernel refuses memory that is not there."""
        pick = self.random.choice
        if self.ring is None or self.random.random() < 0.1:
            depth, piece = pick((1, 8, self.number())), pick((4096, 65536, self.number()))
            fused = pick((0, 0, 4096, piece, self.number()))
            # Not a number at random: it may be a pipe, and a read of that may well have no end.
            fd = pick((self.fd, self.fd, -1, 99_999, 2**31, -(2**31) - 1, "3", None))

            def make() -> None:
                self.ring = _native.UringRing(fd, depth, piece, pick((True, False)), fused)

            return self.named("ring", make, (fd, depth, piece, fused))
        ring = self.ring
        if self.random.random() < 0.2:
            pieces = [(self.word(), self.word()) for _ in range(self.random.randrange(3))]
            given = pick((pieces, [(self.place(4096), 4096)], [(-1, 5)], None))
            return self.named("register", lambda: ring.register_buffers(given), (given,))
        offsets = np.array([pick((0, 512, 1024, 2**62, -5, 2**63 - 1)) for _ in range(3)], np.int64)
        sizes = np.array([pick((0, 7, 512, 2**62, -1)) for _ in range(3)], np.int64)
        addresses = np.array([self.place(1024) for _ in range(3)], np.uint64)
        if self.random.random() < 0.5:
            sizes = np.minimum(sizes, 1024)
            addresses[pick(range(3))] = pick((0, 1, 4096, 2**47, 2**63, 2**64 - 1))
        else:
            sizes = np.where(sizes > 1024, -1, sizes)
        arguments = [
            False,
            offsets,
            addresses,
            sizes,
            pick((None, 0.5, *TIMES)),
            pick((None, 16, self.number())),
        ]
        if self.random.random() < 0.2:
            arguments[self.random.randrange(1, 4)] = self.array()
            sizes[:] = 0
        return self.named("transfer", lambda: ring.transfer(*arguments), arguments)

    def tokens(self) -> Call:
        given = self.random.choice(
            ([self.number()], (self.number(),), self.array(), 5, b"ab", [2**32 - 1, 0])
        )
        return self.named("pack_tokens", lambda: _native.pack_tokens(given), (given,))

    def named(self, name: str, call: Call, arguments: Iterable[object]) -> Call:
        print(name, *map(told, arguments), flush=True)
        return call

    def calls(self, num: int) -> Iterator[Call]:
        kinds = (
            (self.of_trie,) * 6
            + (self.of_keys, self.of_leases, self.of_memory) * 3
            + (self.of_ring, self.of_tables, self.of_packed, self.of_policies) * 2
        )
        for _ in range(num):
            yield self.random.choice((*kinds, self.tokens, self.constructor))()


def told(argument: object) -> str:
    """Return an argument in a few words. Invalid labels have no representation."""
    text = f"Labels{argument.spec}" if isinstance(argument, Labels) else repr(argument)
    return text[:500]


def main(seed: int, num: int) -> None:
    hostile = Hostile(seed)
    for call in hostile.calls(num):
        with suppress(*REFUSALS):
            call()
    hostile.trie.dump()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
