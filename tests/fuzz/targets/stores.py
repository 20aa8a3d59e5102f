"""Replies of a Valkey server, damaged or made up.

Right bytes or none, and no error but the store's own.
"""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

from kvtier.core.errors import CacheError, TierError
from kvtier.testing.storage_user import User, stored_key
from kvtier.tiers import Outcome
from kvtier.tiers.remote.pruning import make_keeper, prune
from tests.fuzz.mutations import damage
from tests.tiers.remote.scripted_server import ScriptedServer, array, bulk
from tests.tiers.remote.valkeys import open_tier

OUTCOMES = frozenset({"used", "refused"})
NUM_BLOCKS = 4
LENGTHS = (0, 1, 4, 96, 352, 1 << 14, 1 << 20, 1 << 31, 20_000_000_000, 1 << 62, 1 << 63, 10**30)
TEXTS = (b"", b"OK", b"0", b"-1", b"kvtierB1", b"ERR x", b"MOVED 1", b"\x1b[2J", b"\r\n", b"x" * 99)


def a_reply(rng: random.Random, depth: int = 0) -> bytes:
    """Return a reply that may be well formed, and may be none."""
    match rng.randrange(9):
        case 0:
            return rng.choice((b"$", b"*", b":")) + b"%d\r\n" % rng.choice(LENGTHS)
        case 1:
            return rng.choice((b"$", b"*")) + b"-%d\r\n" % rng.choice(LENGTHS)
        case 2:
            return bulk(rng.choice(TEXTS))
        case 3:
            return rng.choice((b"+", b"-")) + rng.choice(TEXTS) + b"\r\n"
        case 4:
            return b"*1\r\n" * rng.choice((1, 5, 3000))
        case 5 if depth < 6:
            return array(*(a_reply(rng, depth + 1) for _ in range(rng.randrange(4))))
        case 6:
            return bulk(rng.randbytes(rng.choice((1, 96, 352, 5000))))
        case 7:
            return rng.randbytes(rng.randrange(1, 40))
        case _:
            return b":%d\r\n" % rng.choice(LENGTHS)


def attempt(rng: random.Random, folder: Path) -> str:
    del folder

    def alter(_: list[bytes], reply: bytes) -> bytes:
        if rng.random() > share:
            return reply
        return rng.choice(
            (a_reply(rng), damage(reply, rng), damage(reply, rng), b"-NOAUTH x\r\n", b"")
        )

    share = 0.0
    server = ScriptedServer(alter, ends=True)
    try:
        earlier = open_tier(server.port, "fuzz")
        assert User(earlier).put(*range(NUM_BLOCKS)) == [Outcome.THERE] * NUM_BLOCKS
        earlier.close()
        share = rng.choice((0.05, 0.3, 1.0))
        try:
            tier = open_tier(server.port, "fuzz")
        except CacheError as error:
            check(error)
            return "refused"
        user = User(tier)
        user.find(*range(NUM_BLOCKS + 1))
        user.get(*range(NUM_BLOCKS + 1))  # which compares the bytes
        user.put(*range(NUM_BLOCKS + 1))
        with suppress(TierError):
            tier.drop([stored_key(0)], for_good=True)
        check(f"{tier.findings()} {tier.last_error}")
        tier.close()
        look_after(f"valkey://127.0.0.1:{server.port}?prefix=fuzz:")
    finally:
        server.close()
    return "used"


def look_after(url: str) -> None:
    """Use the store as ``kvtier remote`` does."""
    keeper = make_keeper(url)
    for use in (keeper.test, keeper.entries, lambda: prune(keeper, max_bytes=0)):
        try:
            use()
        except CacheError as error:
            check(error)
    keeper.close()


def check(said: object) -> None:
    """Raise where that is nothing that can be shown."""
    text = str(said)
    if not text or not text.isprintable() or len(text) > 500:
        raise ValueError("no sentence that can be printed")
