"""Answers of an S3 server, damaged or made up.

Right bytes or none, and no error but the store's own.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
from contextlib import suppress
from pathlib import Path

from kvtier.core.errors import CacheError, TierError
from kvtier.testing.storage_suite import GROUP
from kvtier.testing.storage_user import User, stored_key
from kvtier.tiers import Outcome, StorageSite
from kvtier.tiers.remote.bucket import objects, tier, upkeep
from kvtier.tiers.remote.bucket.opening import make_s3
from kvtier.tiers.remote.bucket.tier import BucketTier
from tests.fuzz.mutations import damage
from tests.fuzz.targets.stores import check, look_after
from tests.kit.servers import BUCKET
from tests.tiers.remote.scripted_bucket import Answer, Question, ScriptedBucket, listing, refusal

OUTCOMES = frozenset({"used", "refused"})
INPUTS = 5
"""Answers that are altered in a case, about."""
NUM_BLOCKS = 4
MEMORY_BYTES = 1 << 30
"""The client's threads and the server's have stacks of their own."""
CALL_S = 2.0
"""Time limit of a call, which waits this long for bytes that an answer claims and does not send."""
LENGTHS = (0, 1, 4, 95, 96, 4096, 1 << 20, 1 << 26, 1 << 31, 20_000_000_000, 1 << 63, 10**30)
TEXTS = (
    *("", " ", "-1", "x", "1_0", "nan", '""', "*", 'W/"x"', "\x1b[2J", "\xff", "x" * 5000),
    *("bytes */4", "bytes 0-0/1", "bytes 5-2/9", "Thu, 01 Jan 1970 00:00:00 GMT", "../../x"),
    *("9999-12-31T23:59:59Z", "-9999-01-01T00:00:00Z", "gzip", "chunked", "http://127.0.0.1:1/"),
)
HEADERS = (
    *("content-length", "content-range", "etag", "last-modified", "content-type", "location"),
    *(
        "transfer-encoding",
        "content-encoding",
        "x-amz-version-id",
        "retry-after",
        "x-amz-meta-\xff",
    ),
)
CODES = ("NoSuchBucket", "AccessDenied", "SlowDown", "x" * 100, "\x1b[2J", "", "&lt;x&gt;")
STATUSES = (100, 200, 204, 206, 301, 304, 307, 400, 403, 404, 409, 412, 416, 429, 500, 503, 999)
NAMES = ("", "/", "..", "../x", "manifests/../x", "manifests//x", "packs/\u2028", "manifests/%00")


def a_list(rng: random.Random, answer: Answer) -> bytes:
    """Return a list that does not fit the request: well formed, or not."""
    name = rng.choice(NAMES)
    size = rng.choice((*LENGTHS, -1, "x", ""))
    match rng.randrange(8):
        case 0:
            return listing({f"fuzz/manifests/{name}": rng.choice(LENGTHS)})
        case 1:
            return listing({name: 7, f"manifests/{name}": rng.choice(LENGTHS)}, more="again")
        case 2:
            return listing({}, more="again")
        case 3:
            return listing({f"fuzz/manifests/{at}": 64 for at in range(rng.choice((50, 2000)))})
        case 4:
            return b"<a>" * rng.choice((5, 100_000))
        case 5:
            entities = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>'
            return entities + answer.body.replace(b"fuzz", b"&b;")
        case 6:
            return answer.body.replace(b"2026-11", rng.choice(TEXTS).encode())
        case _:
            text = answer.body.decode().replace("<Size>", f"<Size>{size}</Size><Size>")
            return text.encode()


def flipped(content: bytes, rng: random.Random) -> bytes:
    """Return content of the same length with another byte in it, rather near its end."""
    made = bytearray(content)
    made[-1 - rng.randrange(min(len(made), 1 << rng.randrange(13)))] ^= rng.randrange(1, 256)
    return bytes(made)


def an_answer(rng: random.Random, asked: Question, answer: Answer) -> bytes:
    """Return an answer that may be well formed, and may be none."""
    has_body = asked.method != "HEAD"
    made = Answer(answer.status, dict(answer.headers), answer.body)
    match rng.randrange(15):
        case 0:
            made.status = rng.choice(STATUSES)
        case 1:
            made.headers["content-length"] = rng.choice((*map(str, LENGTHS), *TEXTS))
        case 2:
            made.headers[rng.choice(HEADERS)] = rng.choice((*map(str, LENGTHS), *TEXTS))
        case 3:
            made.headers.pop(rng.choice(list(made.headers) or [""]), None)
        case 4:
            first, size = rng.choice((0, 1, 96)), rng.choice(LENGTHS)
            made.headers["content-range"] = f"bytes {first}-{rng.choice(LENGTHS)}/{size}"
        case 5:
            made.body = a_list(rng, answer)
        case 6 | 7 | 8:
            made.body = rng.choice((b"", damage(answer.body, rng), rng.randbytes(4096)))
        case 9 | 10 | 11 if answer.body:
            made.body = flipped(answer.body, rng)
        case 12:
            made = refusal(rng.choice(STATUSES), rng.choice(CODES))
        case 13:
            made.headers = {"transfer-encoding": "chunked"}
            length = b"%x" % rng.choice(LENGTHS)
            return made.to_bytes() + rng.choice((length, b"-1", b"x", b"")) + b"\r\nabc\r\n"
        case _:
            return damage(answer.to_bytes(has_body), rng)
    return made.to_bytes(has_body or rng.random() < 0.1)


def open_tier(url: str) -> BucketTier:
    """Open one process's tier. It reads the manifests of other writers only on request."""
    location = f"//{BUCKET}/fuzz?endpoint={url}&poll_s=0&publish_s=3600"
    made = make_s3(StorageSite("s3", location, GROUP, 64 * GROUP.bytes_per_block))
    assert isinstance(made, BucketTier)
    return made


M_ARENA_MAX = -8


def prepare() -> None:
    """Set this process up: credentials, no patience, and no address space for nothing."""
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # each thread has 64 MiB else
    threading.stack_size(1 << 18)
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = "id", "secret"
    objects.NUM_RETRIES = 0  # type: ignore[misc]
    objects.REQUEST_S = CALL_S  # type: ignore[misc]
    upkeep.OPEN_S = upkeep.FIRST_S = upkeep.BACKGROUND_S = CALL_S  # type: ignore[misc]
    tier.CLOSE_S = CALL_S  # type: ignore[misc]


def attempt(rng: random.Random, folder: Path) -> str:
    del folder
    prepare()

    def alter(asked: Question, answer: Answer) -> bytes:
        if rng.random() > share or about not in f"{asked.name} {asked.query.get('prefix')}":
            return answer.to_bytes(asked.method != "HEAD")
        if denial is not None:
            return denial.to_bytes(asked.method != "HEAD")
        return b"" if rng.random() < 0.05 else an_answer(rng, asked, answer)

    denial = refusal(403, rng.choice(CODES[:2])) if rng.random() < 0.2 else None
    about = rng.choice(("", "packs", "manifests", "self-test")) if denial is None else ""
    share = 0.0
    server = ScriptedBucket(alter, ends=True)
    try:
        earlier = open_tier(server.url)
        assert User(earlier).put(*range(NUM_BLOCKS)) == [Outcome.THERE] * NUM_BLOCKS
        earlier.close()  # which publishes to others
        share = rng.choice((0.05, 0.3, 1.0)) if denial is None else 1.0
        try:
            made = open_tier(server.url)
        except CacheError as error:
            check(error)
            return "refused"
        user = User(made, timeout_s=CALL_S)
        for _ in range(2):
            user.find(*range(NUM_BLOCKS + 1))
            user.get(*range(NUM_BLOCKS + 1))  # which compares the bytes
            user.put(*range(NUM_BLOCKS + 1))
            with suppress(TierError):
                made.exchange(CALL_S)
        with suppress(TierError):
            made.drop([stored_key(0)], for_good=True)
        check(f"{made.findings()} {made.last_error}")
        made.check_invariants()
        made.close()
        look_after(f"s3://{BUCKET}/fuzz?endpoint={server.url}")
    finally:
        server.close()
    return "used"
