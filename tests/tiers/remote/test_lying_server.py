"""Replies that no server sends.

Memory is allocated only within bounds, whatever a reply claims. The call ends like a call to a
server that does not answer.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.transfer.local import FAILURES_UNTIL_OPEN, LocalMover
from kvtier.core.errors import CacheError, ConfigError, TierError
from kvtier.testing.storage_user import User, stored_key
from kvtier.tiers import Outcome
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.remote.pruning import make_keeper
from kvtier.tiers.remote.valkey import resp
from kvtier.tiers.remote.valkey.connection_pool import reason_of
from kvtier.tiers.remote.valkey.resp import ReplyError, RespConnection, RespError
from tests.kit.servers import free_port
from tests.tiers.remote.scripted_server import ScriptedServer, array, bulk
from tests.tiers.remote.valkeys import open_tier

THERE, ABSENT, DAMAGED, FAILED = Outcome
LIES = {
    "long string": b"$20000000000\r\n",
    "long as memory": b"$1000000000000000000\r\n",
    "2^63": b"$9223372036854775808\r\n",
    "2^63 as a number": b":9223372036854775808\r\n",
    "not quite a number": b":1_0\r\n",
    "negative": b"$-2\r\n",
    "many entries": b"*2000000000\r\n",
    "deep": b"*1\r\n" * 100_000,
    "wide": b"*1000000\r\n" * 3,
    "an error inside": b"*2\r\n-ERR no\r\n$-1\r\n",
    "no number": b"$x\r\n",
    "a long number": b"$" + b"9" * 5000 + b"\r\n",
    "half a line end": b"+OK\n" * 2,
}


@pytest.fixture
def liar() -> Iterator[ScriptedServer]:
    made = ScriptedServer()
    yield made
    made.close()


@pytest.fixture
def _little_memory() -> Iterator[None]:
    """Limit memory, so that an allocation of a claimed size fails at once."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_lie_ends_every_call_as_a_store_fails(liar: ScriptedServer, lie: bytes) -> None:
    liar.alter = lambda words, reply: lie if words[0] in (b"INFO", b"GETRANGE") else reply
    tier = open_tier(liar.port, "start")  # a server that is not understood is tried again later
    assert "not reached" in tier.findings()[0].found
    liar.alter = lambda _, reply: reply
    user = User(tier)
    assert user.put(1, 2) == [THERE] * 2
    liar.alter = lambda _, __: lie
    assert user.find(1) != [THERE]
    assert user.get(1)[0] is not THERE
    with pytest.raises(TierError, match="drop failed"):
        tier.drop([stored_key(1)], for_good=True)
    keeper = make_keeper(f"valkey://127.0.0.1:{liar.port}")
    with pytest.raises(CacheError, match="not reached"):
        keeper.test()
    liar.alter = lambda words, reply: lie if words[0] == b"SCAN" else reply
    with pytest.raises(CacheError, match="does not answer"):
        keeper.entries()
    keeper.close()
    liar.alter = lambda _, reply: reply
    assert user.put(3) == [THERE]


@pytest.mark.parametrize("length", [20_000_000_000, 1 << 62])
def test_value_that_claims_to_be_endless_is_damaged_and_removed(
    liar: ScriptedServer, length: int
) -> None:
    tier = open_tier(liar.port, "endless")
    user = User(tier)
    user.put(1, 2)
    liar.alter = lambda words, reply: b"$%d\r\n" % length if words[0] == b"GET" else reply
    assert user.get(1, 2) == [DAMAGED, FAILED], "and nothing is waited for"
    liar.alter = lambda _, reply: reply
    assert user.find(1, 2) == [ABSENT, THERE]


def test_honest_replies_up_to_the_limits_are_read(
    liar: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resp, "MAX_REPLY_BYTES", 10)
    monkeypatch.setattr(resp, "MAX_ITEMS", 3)
    nested = array(bulk(b"12345"), array(bulk(b"67890")))
    for reply, is_read in (
        (nested, True),
        (array(nested), False),
        (array(bulk(b"12345"), bulk(b"678901")), False),
        (array(b"+12345\r\n", b"+678901\r\n"), False),
        (array(b":9223372036854775807\r\n", b":-9223372036854775808\r\n"), True),
    ):
        liar.alter = lambda _, __, reply=reply: reply  # type: ignore[misc]
        line = RespConnection("127.0.0.1", liar.port, None, time.monotonic() + 10)
        line.send([resp.command(b"ANY")])
        if is_read:
            assert line.reply() is not None
        else:
            with pytest.raises(RespError, match=resp.TOO_LARGE):
                line.reply()
        line.close()


def test_scan_without_an_end_ends(liar: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.tiers.remote.valkey import keeper

    monkeypatch.setattr(keeper, "MAX_PAGES", 50)
    liar.alter = lambda words, reply: array(bulk(b"7"), array()) if words[0] == b"SCAN" else reply
    scanning = make_keeper(f"valkey://127.0.0.1:{liar.port}")
    with pytest.raises(CacheError, match="a scan that does not end"):
        scanning.entries()
    scanning.close()


ERRORS = {
    "LOADING": b"-LOADING Valkey is loading the dataset in memory\r\n",
    "NOAUTH": b"-NOAUTH Authentication required.\r\n",
    "MOVED": b"-MOVED 1 127.0.0.1:1\r\n",
    "BUSY": b"-BUSY Valkey is busy running a script.\r\n",
}


@pytest.mark.parametrize("code", ERRORS)
def test_server_that_answers_with_an_error_does_not_look_empty(
    liar: ScriptedServer, code: str
) -> None:
    tier = open_tier(liar.port, "loading")
    user = User(tier)
    assert user.put(1, 2) == [THERE] * 2
    liar.alter = lambda _, __: ERRORS[code]
    assert user.find(1, 2, 3) == user.get(1, 2, 3) == user.put(1, 2, 3) == [FAILED] * 3
    assert tier.last_error == code
    liar.alter = lambda _, reply: reply
    assert user.find(1, 2, 3) == [THERE, THERE, ABSENT]


@pytest.mark.parametrize("asked", [b"OBJECT", b"STRLEN", b"GETRANGE"])
def test_prune_stops_at_a_server_that_answers_with_an_error(
    liar: ScriptedServer, asked: bytes
) -> None:
    tier = open_tier(liar.port, "kvtier")
    assert User(tier).put(1, 2) == [THERE] * 2
    tier.close()
    keeper = make_keeper(f"valkey://127.0.0.1:{liar.port}")
    liar.alter = lambda words, reply: ERRORS["LOADING"] if words[0] == asked else reply
    with pytest.raises(CacheError, match="does not answer: LOADING"):
        keeper.ours(keeper.entries())
    keeper.close()


def test_breaker_opens_for_a_server_that_answers_with_errors_only(liar: ScriptedServer) -> None:
    tier = open_tier(liar.port, "breaker")
    liar.alter = lambda _, __: ERRORS["LOADING"]
    mover = LocalMover({"valkey": tier}, None)
    for _ in range(FAILURES_UNTIL_OPEN):
        assert mover.breaker("valkey") is BreakerState.CLOSED
        assert mover.find("valkey", [stored_key(1)]).wait(30)
    assert mover.breaker("valkey") is BreakerState.OPEN
    mover.close(10)


def test_log_says_why_calls_to_a_store_are_paused(caplog: pytest.LogCaptureFixture) -> None:
    tier = open_tier(free_port(), "dead", bytes_per_s="1GiB")
    mover = LocalMover({"valkey": tier}, None)
    for _ in range(FAILURES_UNTIL_OPEN):
        assert mover.find("valkey", [stored_key(1)]).wait(30)
    expected = "storage calls are paused lane=valkey find error='Connection refused'"
    assert expected in caplog.text
    mover.close(10)


def test_key_of_another_type_is_no_block(liar: ScriptedServer) -> None:
    tier = open_tier(liar.port, "kinds")
    user = User(tier)
    assert user.put(1, 2) == [THERE] * 2
    name = b"kinds:" + stored_key(1)
    wrong = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
    liar.alter = lambda words, reply: (
        wrong if words[0] == b"GETRANGE" and words[1] == name else reply
    )
    assert user.find(1, 2) == [ABSENT, THERE]
    assert user.put(1) == [THERE], "which takes its place"


SECRET = "open-sesame"


@pytest.mark.parametrize(
    "said",
    [
        f"-ERR unknown {SECRET}\r\n",
        f"-WRONGPASS {SECRET}\r\n",
        f"-{SECRET} ERR\r\n",
        f"-\x1b[2J{SECRET}\r\n",
        "-\r\n",
    ],
)
def test_text_of_a_server_is_told_nowhere(
    liar: ScriptedServer, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    tier = open_tier(liar.port, "said")
    liar.alter = lambda _, __: said.encode()
    with pytest.raises(TierError) as caught:
        tier.drop([stored_key(1)], for_good=True)
    keeper = make_keeper(f"valkey://127.0.0.1:{liar.port}")
    with pytest.raises(CacheError) as tested:
        keeper.test()
    liar.alter = lambda words, reply: said.encode() if words[0] == b"SCAN" else reply
    with pytest.raises(CacheError) as asked:
        keeper.entries()
    liar.alter = lambda _, __: said.encode()
    shown = [str(caught.value), str(tested.value), str(asked.value), caplog.text]
    try:
        again = open_tier(liar.port, "said")
        shown += [str(again.findings())]
        again.close()
    except ConfigError as refused:
        shown += [str(refused)]
    assert not any(SECRET in each or "\x1b" in each for each in shown)
    keeper.close()


def test_code_of_an_error_is_told() -> None:
    assert reason_of(ReplyError("NOAUTH Authentication required.")) == "NOAUTH"
    assert reason_of(ReplyError("hunter2")) == "an error without a code"
