"""Answers that no S3 server gives: the request fails as if there were no answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvtier.core.errors import CacheError, ConfigError
from tests.kit.servers import BUCKET
from tests.tiers.remote.scripted_bucket import (
    Answer,
    Question,
    ScriptedBucket,
    listing,
    refusal,
    unaltered,
)

pytest.importorskip("obstore")

from kvtier.tiers.remote.bucket import objects
from kvtier.tiers.remote.keeper import StoreKeeper
from kvtier.tiers.remote.pruning import make_keeper

SECRET = "open-sesame"


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedBucket]:
    monkeypatch.setattr(objects, "NUM_RETRIES", 0)
    made = ScriptedBucket()
    yield made
    made.close()


def keeper_of(server: ScriptedBucket) -> StoreKeeper:
    return make_keeper(f"s3://{BUCKET}/x?endpoint={server.url}")


def test_honest_answers_are_read(liar: ScriptedBucket) -> None:
    keeper = keeper_of(liar)
    assert "ms a request" in keeper.test()
    assert keeper.entries() == []


def test_list_of_endless_pages_ends(liar: ScriptedBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_LISTED", 5000)
    page = Answer(body=listing({f"x/packs/{at}": 1 for at in range(100)}, more="again"))
    liar.alter = lambda asked, _: unaltered(asked, page)
    with pytest.raises(CacheError, match="does not answer: a list that does not end"):
        keeper_of(liar).entries()


def test_list_of_endless_empty_pages_ends(
    liar: ScriptedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "REQUEST_S", 0.5)
    liar.alter = lambda asked, _: unaltered(asked, Answer(body=listing({}, more="again")))
    with pytest.raises(CacheError, match="does not answer: no answer"):
        keeper_of(liar).entries()


@pytest.mark.parametrize("code", [f"\x1b[2J{SECRET}", f"ERR {SECRET}", f"{SECRET} ERR", ""])
@pytest.mark.parametrize("status", [403, 500])
def test_text_of_a_server_is_told_nowhere(liar: ScriptedBucket, status: int, code: str) -> None:
    def refuse(asked: Question, _: Answer) -> bytes:
        return unaltered(asked, refusal(status, f"{code}</Code><Message>{SECRET}</Message><Code>"))

    liar.alter = refuse
    with pytest.raises((CacheError, ConfigError), match=f"status {status}") as caught:
        keeper_of(liar).test()
    shown = f"{caught.value} {caught.value.__cause__!r} {caught.value.__context__!r}"
    assert SECRET not in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("status", "code", "sentence"),
    [
        (301, "PermanentRedirect", "is in another region or at another address"),
        (501, "NotImplemented", "does not know writes that only create an object"),
    ],
)
def test_store_that_will_refuse_again_is_refused_with_the_reason(
    liar: ScriptedBucket, status: int, code: str, sentence: str
) -> None:
    def refuse(question: Question, answer: Answer) -> bytes:
        if status == 501 and "if-none-match" not in {name.lower() for name in question.headers}:
            return unaltered(question, answer)
        body = f"<Error><Code>{code}</Code><Message>x</Message></Error>".encode()
        return Answer(status, {"x-amz-bucket-region": "eu-central-1"}, body).to_bytes(
            question.method != "HEAD"
        )

    liar.alter = refuse
    keeper = keeper_of(liar)
    with pytest.raises(ConfigError, match=sentence):
        keeper.test()
    keeper.close()


SLOW_WAKER = """
import sys, time
from asyncio.selector_events import BaseSelectorEventLoop
from kvtier.tiers.remote.pruning import make_keeper

wake = BaseSelectorEventLoop._write_to_self

def slowly(loop):
    wake(loop)
    time.sleep(0.05)

BaseSelectorEventLoop._write_to_self = slowly
make_keeper(sys.argv[1]).test()
"""
"""A client's thread is still in the interpreter when it has handed over its last result."""


def test_process_ends_while_a_thread_of_the_client_is_in_the_interpreter(
    liar: ScriptedBucket,
) -> None:
    url = f"s3://{BUCKET}/x?endpoint={liar.url}"
    ended = subprocess.run(
        [sys.executable, "-c", SLOW_WAKER, url], check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
