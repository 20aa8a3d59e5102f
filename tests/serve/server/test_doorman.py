"""Limits on connections: the ones kept and the ones closed, on a clock that tests advance."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from kvtier.control.doorman import NUM_RESERVED, Doorman, possible_connections
from kvtier.core.errors import ConfigError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class FakeClient:
    unsent_bytes: int = 0
    is_open: bool = True

    def abort(self) -> None:
        assert self.is_open
        self.is_open = False


@dataclass
class Door:
    """A doorman for three connections, and the reasons for which he closed some."""

    clock: Clock = field(default_factory=Clock)
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.doorman = Doorman(3, 10.0, 60.0, self.reasons.append, self.clock)

    def come(self, number: int) -> list[FakeClient]:
        clients = [FakeClient() for _ in range(number)]
        for client in clients:
            self.doorman.came(client)
        return clients


@pytest.fixture
def door() -> Door:
    return Door()


def test_who_asks_nothing_leaves_for_who_asks(door: Door) -> None:
    clients = door.come(5)
    door.doorman.asks(clients[0])
    assert door.doorman.make_room()
    assert [client.is_open for client in clients] == [True, False, False, True, True]
    assert door.reasons == ["room", "room"]


def test_who_asked_is_never_thrown_out_for_another(door: Door) -> None:
    clients = door.come(4)
    for client in clients:
        door.doorman.asks(client)
    assert not door.doorman.make_room()
    assert all(client.is_open for client in clients)
    door.doorman.left(clients[0])
    assert door.doorman.make_room()


def test_beyond_the_reserve_the_longest_waiting_leaves(door: Door) -> None:
    clients = door.come(3 + NUM_RESERVED)
    assert all(client.is_open for client in clients)
    door.doorman.asks(clients[0])
    door.come(1)
    assert [client.is_open for client in clients[:3]] == [True, False, True]


def test_who_is_still_sent_an_answer_stays(door: Door) -> None:
    clients = door.come(4)
    clients[0].unsent_bytes = 10
    assert door.doorman.make_room()
    door.clock.now += 11
    door.doorman.sweep()
    assert [client.is_open for client in clients] == [True, False, False, False]
    assert door.reasons == ["room", "header_timeout", "header_timeout"]


def test_a_header_has_its_time_and_after_an_answer_again(door: Door) -> None:
    slow, quick = door.come(2)
    door.doorman.asks(quick)
    door.clock.now += 9.9
    door.doorman.sweep()
    assert slow.is_open
    door.doorman.waits(quick)
    door.clock.now += 0.1
    door.doorman.sweep()
    assert (slow.is_open, quick.is_open) == (False, True)
    door.clock.now += 9.9
    door.doorman.sweep()
    assert not quick.is_open


def test_who_leaves_an_answer_unread_leaves_and_a_slow_reader_stays(door: Door) -> None:
    stuck, slow = clients = door.come(2)
    for client in clients:
        door.doorman.asks(client)
        client.unsent_bytes = 1000
    for _ in range(7):
        door.doorman.sweep()
        door.clock.now += 10
        slow.unsent_bytes -= 1
    door.doorman.sweep()
    assert (stuck.is_open, slow.is_open) == (False, True)
    assert door.reasons == ["write_timeout"]


@pytest.mark.parametrize(
    ("limit", "wanted", "expected"),
    [(resource.RLIM_INFINITY, 5000, 5000), (100_000, 5000, 5000), (1000, 5000, 600)],
)
def test_there_are_no_more_connections_than_open_files(
    limit: int,
    wanted: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    found = possible_connections(wanted)
    assert expected <= found <= expected + NUM_RESERVED * 4
    assert ("connections limited" in caplog.text) == (found < wanted)
    assert caplog.records == [] or caplog.records[0].levelno == logging.WARNING


def test_descriptors_of_readers_of_events_are_left_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1000, 1000))
    without = possible_connections(5000)
    assert possible_connections(5000, 256) == without - 256


def test_too_few_open_files_for_a_server_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    with pytest.raises(ConfigError, match="may open 64 files, too few for a server; raise"):
        possible_connections(10)


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes() -> None:
    code = (
        "import resource as r; from kvtier.control.doorman import raise_descriptor_limit\n"
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1]\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (200, hard)); raise_descriptor_limit()\n"
        "assert r.getrlimit(r.RLIMIT_NOFILE) == (hard, hard)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
