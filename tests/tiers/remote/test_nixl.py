"""Blocks in files, by real plug-ins of NIXL."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvtier.core.errors import ConfigError, TierError
from kvtier.core.types import BlockKey
from kvtier.testing.storage_user import User, stored_key
from kvtier.tiers import Outcome, StorageTier
from kvtier.tiers.remote.envelope import HEADER_BYTES
from tests.kit.waiting import wait_until
from tests.tiers.remote.store_tests import (
    CodedStoreTests,
    Place,
    StoreSuite,
    StoreTests,
    open_store,
)

pytestmark = pytest.mark.skipif(
    find_spec("nixl") is None, reason="no NIXL: make test-stores installs it"
)

THERE, ABSENT, DAMAGED, FAILED = Outcome
QUEUES = ("use_aio", "use_uring")


def open_tier(place: str, num_blocks: int = 64, **options: Any) -> StorageTier:
    """Open a tier. place: the part of the URL behind "nixl://"."""
    return open_store(f"nixl://{place}", num_blocks, **options)


def file_of(folder: Path, key: BlockKey) -> Path:
    return folder / key.hex()[:2] / key.hex()


class Gate:
    """Holds every transfer after a number of them, like a file system that lost its server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvtier.tiers.remote.nixl.agent import Agent

        self._open = Event()
        self._open.set()
        move = Agent.move

        def held(agent: Agent, *arguments: Any) -> list[bool]:
            self._open.wait()
            return move(agent, *arguments)

        monkeypatch.setattr(Agent, "move", held)

    @contextmanager
    def closed(self) -> Iterator[None]:
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


class FilesPlace(Place):
    params = ""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def open_tier(
        self, place: str, num_blocks: int = 64, *shape: Any, **options: Any
    ) -> StorageTier:
        url, options = f"nixl://POSIX{self.folder}/{place}", {"params": self.params, **options}
        return open_store(url, num_blocks, *shape, **options)

    def value(self, place: str, key: BlockKey) -> bytes:
        return file_of(self.folder / place, key).read_bytes()

    def replace(self, place: str, key: BlockKey, content: bytes) -> None:
        path = file_of(self.folder / place, key)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


class TestFilesTier(FilesPlace, StoreSuite):
    params = "use_aio=true"

    @pytest.fixture(autouse=True)
    def _gate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = Gate(monkeypatch)

    def hang(self, storage: StorageTier) -> Any:
        return self.gate.closed()

    def check(self, storage: StorageTier) -> None:
        wait_until(lambda: not [*self.folder.rglob("*.part")], "all files are finished")

    @pytest.mark.slow
    def test_agrees_with_a_dictionary(self) -> None:
        super().test_agrees_with_a_dictionary()


@pytest.mark.slow
class TestFilesTierWithUring(TestFilesTier):
    params = "use_uring=true"


class TestFiles(FilesPlace, StoreTests):
    def test_file_that_was_not_finished_is_none(self) -> None:
        """A killed process leaves such a file."""
        tier = self.open_tier("killed")
        user = User(tier)
        assert user.put(1, 2) == [THERE] * 2
        path = file_of(self.folder / "killed", stored_key(1))
        path.rename(path.with_name(f"{path.name}.0123.part"))
        assert user.find(1) == user.get(1) == [ABSENT]
        assert user.put(1) == user.get(1) == [THERE]

    @pytest.mark.parametrize("direct", ["true", "false"])
    @pytest.mark.parametrize("queue", QUEUES)
    def test_every_way_gives_the_same_bytes(self, queue: str, direct: str) -> None:
        tier = self.open_tier("ways", params=f"{queue}=true", direct=direct)
        user = User(tier)
        assert user.put(*range(70)) == [THERE] * 70
        tier.close()
        tier = self.open_tier("ways", direct="false")
        assert User(tier).get(*range(70)) == [THERE] * 70

    def test_one_bad_file_does_not_spoil_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A transfer has one status for all files: if it fails, they are read one by one."""
        tier = self.open_tier("bad")
        user = User(tier)
        assert user.put(*range(10)) == [THERE] * 10
        bad = os.stat(file_of(self.folder / "bad", stored_key(4)))
        fstat, looks = os.fstat, list[int]()

        def fooled(descriptor: int) -> os.stat_result:
            """The file is cut between the check of its length and the read."""
            found = fstat(descriptor)
            looks.append(found.st_ino)
            if looks.count(bad.st_ino) == 2:  # the first one is for its kind
                os.truncate(file_of(self.folder / "bad", stored_key(4)), 100)
            return found

        monkeypatch.setattr("kvtier.tiers.remote.nixl.files.os.fstat", fooled)
        outcomes = user.get(*range(10))
        monkeypatch.undo()
        assert outcomes == [THERE] * 4 + [FAILED] + [THERE] * 5
        assert user.get(4) == [DAMAGED]
        assert user.put(4) == user.get(4) == [THERE]

    @pytest.mark.parametrize("kind", ["pipe", "link", "link to nowhere", "folder"])
    def test_what_is_no_file_in_a_place_of_a_block_is_not_read(self, kind: str) -> None:
        tier = self.open_tier("planted")
        user = User(tier)
        assert user.put(1, 2) == [THERE] * 2
        path = file_of(self.folder / "planted", stored_key(1))
        elsewhere = self.folder / "elsewhere"
        path.rename(elsewhere)
        content = elsewhere.read_bytes()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(elsewhere if kind == "link" else self.folder / "nowhere")
        assert user.find(1) == [ABSENT]
        planted, whole = user.get(1, 2)
        assert planted in (DAMAGED, FAILED)
        assert whole is THERE
        if kind != "folder":
            assert user.put(1) == user.get(1) == [THERE]
            assert path.is_file()
            assert not path.is_symlink()
        assert elsewhere.read_bytes() == content
        tier.close()

    def test_folder_that_is_a_link_is_not_followed(self) -> None:
        tier = self.open_tier("linked")
        user = User(tier)
        assert user.put(1) == [THERE]
        folder = file_of(self.folder / "linked", stored_key(1)).parent
        elsewhere = self.folder / "elsewhere"
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
        before = sorted(elsewhere.iterdir())
        assert user.find(1) == user.get(1) == user.put(1) == [FAILED]
        with pytest.raises(TierError, match="drop failed"):
            tier.drop([stored_key(1)], for_good=True)
        assert sorted(elsewhere.iterdir()) == before

    @pytest.mark.parametrize("what", ["file", "folder"])
    def test_what_is_another_users_is_not_used(
        self, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tier = self.open_tier("theirs")
        user = User(tier)
        assert user.put(1) == [THERE]
        path = file_of(self.folder / "theirs", stored_key(1))
        owner = os.geteuid()
        if owner:
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        else:  # its files are everybody's
            os.chown(path if what == "file" else path.parent, 1, -1)
        assert user.find(1) in ([ABSENT], [FAILED])
        assert user.get(1) in ([DAMAGED], [FAILED])

    def test_folders_and_files_are_for_this_user_alone(self) -> None:
        before = os.umask(0)
        try:
            tier = self.open_tier("mine")
            assert User(tier).put(1) == [THERE]
            tier.close()
        finally:
            os.umask(before)
        path = file_of(self.folder / "mine", stored_key(1))
        modes = [each.stat().st_mode & 0o777 for each in (path, path.parent, path.parent.parent)]
        assert modes == [0o600, 0o700, 0o700]

    def test_folder_that_every_user_may_write_to_is_refused(self) -> None:
        (self.folder / "open").mkdir()
        (self.folder / "open").chmod(0o777)
        with pytest.raises(ConfigError, match="every user may write to"):
            self.open_tier("open")

    def test_full_disk_refuses_and_serves(self) -> None:
        import resource

        tier = self.open_tier("full")
        user = User(tier)
        assert user.put(1) == [THERE]
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            outcomes = user.put(2, 3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert outcomes == [FAILED] * 2
        assert user.get(1) == [THERE]
        assert user.find(2) == [ABSENT]
        assert not [*self.folder.rglob("*.part")]
        assert user.put(2) == user.get(2) == [THERE]


@pytest.mark.slow
class TestCoded(FilesPlace, CodedStoreTests):
    def is_meant(self, value: bytes, original: bytes) -> bool:
        """Bytes behind the value, in whole pages, have no meaning."""
        num_meant = HEADER_BYTES + int.from_bytes(original[16:24], "little")
        return value[:num_meant] != original[:num_meant] or len(value) % 4096 != 0


def test_writers_that_are_killed_leave_whole_blocks_only(tmp_path: Path) -> None:
    script = (
        "from tests.tiers.remote.test_nixl import *\n"
        "tier = open_tier(f'POSIX{sys.argv[1]}', 10_000)\n"
        "for first in range(0, 10_000, 50): User(tier).put(*range(first, first + 50))\n"
    )
    for num_blocks in (10, 300, 1000):
        writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
        wait_until(lambda num=num_blocks: len([*tmp_path.glob("??/*")]) > num)  # type: ignore[misc]
        writer.kill()
        writer.wait()
    tier = open_tier(f"POSIX{tmp_path}", 10_000)
    outcomes = User(tier).get(*range(10_000))  # which compares every byte
    assert {*outcomes} <= {THERE, ABSENT}
    assert THERE in outcomes, "nothing was written: the test is too short"
    tier.close()


# -- the contract ----------------------------------------------------------------------------------


def test_plug_in_that_calls_cut_reads_done_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL 1.4 reports such reads as done."""
    from kvtier.tiers.remote.nixl.agent import Agent

    monkeypatch.setattr(Agent, "_has_moved", lambda agent, handle: bool(_waited(agent, handle)))
    with pytest.raises(ConfigError, match="calls a read done that was cut short"):
        open_tier(f"POSIX{tmp_path}")


def _waited(agent: Any, handle: Any) -> bool:
    while True:
        try:
            if agent._agent.check_xfer_state(handle) != "PROC":
                return True
        except Exception:
            return True


def test_queue_that_blames_others_is_refused(tmp_path: Path) -> None:
    """POSIX AIO does so, also in NIXL 1.5.1."""
    with pytest.raises(ConfigError, match="gives a read the error of another one"):
        open_tier(f"POSIX{tmp_path}", params="use_posix_aio=true")


@pytest.mark.parametrize("version", ["1.4.1", "2.0.0", "0.9"])
def test_version_that_nobody_has_tried_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(ConfigError, match=f"NIXL {version} is not used"):
        open_tier(f"POSIX{tmp_path}")


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("", "no plug-in"),
        ("POSIX", "no folder"),
        ("NOSUCH/folder", "no plug-in NOSUCH"),
        ("UCX/folder", "keeps no files"),
        ("OBJ/bucket", "call a read done that was cut short"),
        ("POSIX/proc/no/such", "not in use|/proc"),
    ],
)
def test_bad_location_is_one_sentence(place: str, sentence: str) -> None:
    try:
        tier = open_tier(place)
    except ConfigError as error:
        found = str(error)
    else:
        found = str(tier.findings()[0])
        tier.close()
    assert any(each in found for each in sentence.split("|")), found


def test_params_are_written_in_pairs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name=value"):
        open_tier(f"POSIX{tmp_path}", params="use_uring")


# -- replicas --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("model", ["random-gqa", "random-mla"])
def test_another_process_loads_what_one_has_computed(tmp_path: Path, model: str) -> None:
    pytest.importorskip("transformers", reason="the embedded engine is not installed")
    from tests.tiers.remote.replica import check_two_replicas

    check_two_replicas(model, f"nixl://POSIX{tmp_path}/store", tmp_path)
