"""Stores and frees blocks until it is killed; for ``test_crash``.

Forks a writer for each line on stdin, so that one interpreter serves many kills. A line on stdout
is complete when it ends with a semicolon. A "stored" line is printed after the block is stored, a
"gone" line before the block is freed.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from tests.tiers.disk.harness import harness, key


def write(path: Path, num_slots: int, num_parts: int, seed: int, first: int) -> None:
    """Claim everything, then store, overwrite and forget without end."""

    def tell(*words: object) -> None:
        os.write(1, (" ".join(map(str, words)) + ";\n").encode())

    rng = random.Random(seed)
    with harness(path, num_slots, num_parts, durability=rng.choice(["process", "power"])) as here:
        for part in here.tier.parts:
            part.slab.compact_floor = rng.choice([8, 64])
        known = {}
        for number in range(first + 1):
            if slots := here.claim([key(number)]):
                known[number] = slots[0]
        number = first
        while True:
            wanted = rng.randint(1, 5)
            while here.tier.num_free < wanted:
                victim = rng.choice(sorted(known))
                tell("gone", victim, 0)
                slot = known.pop(victim)
                if rng.random() < 0.2:
                    here.tier.forget([slot])
                here.tier.free([slot])
            slots = here.allocate(wanted)
            numbers = range(number + 1, number + 1 + wanted)
            number += wanted
            for each, slot, ok in zip(
                numbers, slots, here.store([key(number) for number in numbers], slots), strict=True
            ):
                assert ok
                known[each] = slot
                tell("stored", each, slot)


def main() -> None:
    path, (num_slots, num_parts, seed) = Path(sys.argv[1]), map(int, sys.argv[2:])
    for line in sys.stdin:
        kill, first = map(int, line.split())
        child = os.fork()
        if child == 0:
            try:
                os.write(1, f"{os.getpid()}\n".encode())
                write(path, num_slots, num_parts, seed + kill, first)
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        os.write(1, b"killed\n")


if __name__ == "__main__":
    main()
