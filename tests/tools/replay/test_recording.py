"""Recordings are bounded, contain no text or tokens, and never delay a request."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.core.errors import ConfigError
from kvtier.observe.recording import Chains, Recorder, recorder, salt_from_environment
from kvtier.observe.recording import format as recording_format
from kvtier.tools.replay.trace import Trace
from kvtier.tools.replay.traces import ReadOptions, read_traces
from kvtier.tools.replay.traces.recorded import write_trace

from .samples import shared

CHAINS = Chains(b"s" * 32, block_tokens=4)


class Counted:
    def __init__(self) -> None:
        self.written, self.dropped = 0, 0

    def __call__(self, written: bool) -> None:
        if written:
            self.written += 1
        else:
            self.dropped += 1


def read(*paths: Path) -> Trace:
    return read_traces(paths, ReadOptions(CHAINS))


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    path, counted = tmp_path / "trace", Counted()
    made = Recorder(path, CHAINS, count=counted)
    began = made._started
    made.offer(began + 1, list(range(100, 110)), 5)
    made.offer(began + 3, [*range(100, 108), 7, 7, 7, 7], 6)
    made.offer(began + 2, list(range(100, 110)), 5, tenant="other")
    made.offer(began + 4, [], 0)
    made.close()
    made.close()
    trace = read(path)
    assert trace.times.tolist() == pytest.approx([0, 1, 2, 3], abs=0.01)
    assert trace.input_tokens.tolist() == [10, 10, 12, 0]
    assert trace.output_tokens.tolist() == [5, 5, 6, 0]
    assert trace.block_tokens == 4
    # The first blocks of requests 1 and 3 are equal, unless their tenants differ.
    assert shared(trace) == [0, 0, 2, 0]
    assert (counted.written, counted.dropped) == (4, 0)
    assert path.stat().st_mode & 0o777 == 0o600


def test_neither_tokens_nor_salt_are_in_the_file(tmp_path: Path) -> None:
    tokens = [1_234_567_891] * 8
    made = Recorder(tmp_path / "trace", CHAINS)
    made.offer(0.0, tokens, 1, tenant="tenant-a")
    made.close()
    text = (tmp_path / "trace").read_bytes()
    for secret in (b"1234567891", b"tenant-a", b"s" * 8, np.uint32(tokens[0]).tobytes()):
        assert secret not in text
    other = Chains(b"t" * 32, 4)
    assert not set(CHAINS.keys(tokens).tolist()) & set(other.keys(tokens).tolist())
    assert CHAINS.name != other.name


def test_a_recording_is_continued_behind_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for _ in range(2):
        made = Recorder(path, CHAINS)
        made.offer(made._started, list(range(8)), 1)
        made.close()
        with path.open("a") as file:
            file.write("[1.0,8,")
    assert shared(read(path)) == [0, 2]
    assert read(path).notes


def test_the_last_requests_are_kept_within_the_space_allowed(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    made = Recorder(path, CHAINS, max_bytes=1 << 20)
    rng = np.random.default_rng(1)
    for at in range(160):
        made.offer(made._started + at, rng.integers(0, 1000, 4000).tolist(), at)
    made.close()
    older = tmp_path / "trace.1"
    assert path.stat().st_size + older.stat().st_size <= (1 << 20) + 32_000
    kept = [read(each).output_tokens.tolist() for each in (older, path)]
    assert kept[0] + kept[1] == list(range(160))[-len(kept[0] + kept[1]) :]
    assert len(kept[0] + kept[1]) > 40


def test_a_slow_disk_holds_up_nobody_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, reached = threading.Event(), threading.Event()
    append = Recorder._append

    def slowly(self: Recorder, *asked: Any) -> None:
        reached.set()
        assert gate.wait(30)
        append(self, *asked)

    monkeypatch.setattr(Recorder, "_append", slowly)
    monkeypatch.setattr(recorder, "MAX_QUEUED", 3)
    counted = Counted()
    made = Recorder(tmp_path / "trace", CHAINS, count=counted)
    made.offer(0.0, [1, 2, 3, 4], 0)
    assert reached.wait(30)  # it has left the queue, and is being written
    for _ in range(5):
        made.offer(0.0, [1, 2, 3, 4], 0)
    assert counted.dropped == 2
    gate.set()
    made.close()
    assert counted.written == 4
    made.offer(0.0, [1], 0)
    assert counted.dropped == 3


def test_an_engines_own_hashes_of_prefixes_become_keys(tmp_path: Path) -> None:
    path, counted = tmp_path / "trace", Counted()
    made = Recorder(path, CHAINS, count=counted)
    hashes = [bytes([at]) * 32 for at in range(5)]
    made.offer_hashes(made._started, hashes[:3], 14, 1)
    made.offer_hashes(made._started, [*hashes[:2], hashes[4]], 12, 2)
    made.offer_hashes(made._started, [], 3, 1)
    made.close()
    trace = read(path)
    assert shared(trace) == [0, 2, 0]
    assert trace.input_tokens.tolist() == [14, 12, 3]
    assert not any(hash_value[:8] in path.read_bytes() for hash_value in hashes)
    keys = [Chains(salt, 4).keys_of_hashes(hashes).tolist() for salt in (b"s" * 32, b"t" * 32)]
    assert len({*keys[0], *keys[1]}) == 10
    assert counted.written == 3


def test_what_are_no_tokens_is_left_out_and_the_next_is_recorded(tmp_path: Path) -> None:
    counted = Counted()
    made = Recorder(tmp_path / "trace", CHAINS, count=counted)
    made.offer(0.0, [1, 2, 3, -4], 0)
    made.offer(made._started, [1, 2, 3, 4], 0)
    made.close()
    assert (counted.written, counted.dropped) == (1, 1)
    assert read(tmp_path / "trace").input_tokens.tolist() == [4]


def test_many_tokens_in_the_queue_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_QUEUED_TOKENS", 10)
    counted = Counted()
    made = Recorder(tmp_path / "trace", CHAINS, count=counted)
    made.offer(0.0, [1] * 11, 0)
    made.offer_hashes(0.0, [b"1", b"2"], 8, 0)
    made.offer_hashes(0.0, [b"1"], 4, 0)
    made.close()
    assert (counted.written, counted.dropped) == (1, 2)


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counted()
    made = Recorder(tmp_path / "trace", CHAINS, count=counted)
    made._file.close()
    made._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - the recorder closes it
    made.offer(0.0, [1, 2, 3, 4], 0)
    made.close()
    made.offer(0.0, [1, 2, 3, 4], 0)
    assert (counted.written, counted.dropped) == (0, 2)
    assert len(caplog.records) == 1
    assert "recording stopped" in caplog.text


def test_what_cant_be_recorded_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("Dear")
    with pytest.raises(ConfigError, match="letter is there and is no recording; name another"):
        Recorder(tmp_path / "letter", CHAINS)
    assert (tmp_path / "letter").read_text() == "Dear"
    with pytest.raises(ConfigError, match="record: can't write"):
        Recorder(tmp_path, CHAINS)
    with pytest.raises(ConfigError, match="record_max_bytes: 5 is below 1 MiB"):
        Recorder(tmp_path / "trace", CHAINS, max_bytes=5)
    made = Recorder(tmp_path / "trace", CHAINS)
    with pytest.raises(ConfigError, match="trace is being written to; name another file"):
        Recorder(tmp_path / "trace", CHAINS)
    made.close()
    Recorder(tmp_path / "trace", CHAINS).close()


def test_a_clock_that_is_set_changes_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    monkeypatch.setattr(time, "time", lambda: 100_000.0)
    made = Recorder(path, CHAINS)
    began = time.monotonic()
    made.offer(began, [1, 2, 3, 4], 0)
    monkeypatch.setattr(time, "time", lambda: 1_764_000_000.0)
    made.offer(began + 7, [1, 2, 3, 4], 0)
    made.close()
    header, *rows = map(json.loads, path.read_text().splitlines())
    assert header["started"] == 100_000.0
    assert [row[0] for row in rows] == pytest.approx([0, 7], abs=1)


def test_a_recording_in_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record: there is no directory .*/typo; make it first"):
        Recorder(tmp_path / "typo" / "trace", CHAINS)
    assert not list(tmp_path.iterdir())


def test_what_others_planted_is_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such files are links, pipes (which must not block), and another user's recording."""
    theirs = tmp_path / "theirs"
    Recorder(theirs, CHAINS).close()
    before = theirs.read_bytes()
    (tmp_path / "link").symlink_to(theirs)
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for name in ("link", "dangling"):
        with pytest.raises(ConfigError, match=f"record: .*/{name} is a link; name the file"):
            Recorder(tmp_path / name, CHAINS)
    assert not (tmp_path / "new").exists()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="record: can't write .*pipe: this is no file but"):
        Recorder(tmp_path / "pipe", CHAINS)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigError, match=f"theirs belongs to user {user}, and this process runs"):
        Recorder(theirs, CHAINS)
    assert theirs.read_bytes() == before


def test_the_salt_is_random_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIER_RECORD_SALT", raising=False)
    assert salt_from_environment() != salt_from_environment()
    monkeypatch.setenv("KVTIER_RECORD_SALT", "0123456789abcdef")
    assert salt_from_environment() == salt_from_environment()
    monkeypatch.setenv("KVTIER_RECORD_SALT", "secret")
    with pytest.raises(ConfigError, match="6 characters can be guessed; give 16 or more"):
        salt_from_environment()


def test_a_trace_is_the_same_after_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The writer soon forgets the keys that it has written, and writes them again.
    monkeypatch.setattr(recording_format, "MAX_KNOWN", 5)
    made = Recorder(tmp_path / "one", CHAINS)
    for at in range(30):
        made.offer(made._started + at, [*range(at % 4 * 4), *range(50 + at % 3, 80)], at)
    made.close()
    one = read(tmp_path / "one")
    write_trace(one, "x", tmp_path / "two")
    two = read(tmp_path / "two")
    assert shared(one) == shared(two)
    assert sum(shared(one)) > 100
    assert one.times.tolist() == pytest.approx(two.times.tolist(), abs=0.01)
    with pytest.raises(ConfigError, match="two is there already; name another file"):
        write_trace(one, "x", tmp_path / "two")
