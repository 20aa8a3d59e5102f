"""The tier of a shared directory: as any storage tier, and under faults of a file system."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from kvtier.core.config import DEFAULT_CODING, CodingConfig
from kvtier.core.errors import ConfigError
from kvtier.core.system.plugins import load_plugin
from kvtier.core.types import BlockKey
from kvtier.layout import DType, KVGroup, full_attention
from kvtier.testing import StorageSuite
from kvtier.testing.storage_suite import GROUP
from kvtier.testing.storage_user import User, stored_key
from kvtier.tiers import Outcome, StorageSite, StorageTier
from kvtier.tiers.remote.bucket import directory as directory_module
from kvtier.tiers.remote.bucket.object_store import Missing, Taken
from kvtier.tiers.remote.bucket.opening import make_directory
from kvtier.tiers.remote.bucket.packs import pack_path
from kvtier.tiers.remote.bucket.tier import BucketTier
from kvtier.tiers.remote.envelope import as_keys
from kvtier.tiers.remote.errors import Unreachable, Unwritable
from kvtier.tiers.remote.location import read_location
from kvtier.tiers.remote.migration import StoreAccess, migrate
from kvtier.tiers.remote.pruning import make_keeper, prune
from kvtier.tools.cli import app
from tests.kit.waiting import wait_until
from tests.tiers.remote.bucket import Bucket
from tests.tiers.remote.store_tests import closed_later

THERE, ABSENT, DAMAGED, FAILED = Outcome
TIMEOUT_S = 30.0


class Folder:
    """A directory as a store, and the tiers over it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def location(self, **options: object) -> str:
        query = "&".join(f"{name}={quote(str(value))}" for name, value in options.items())
        return f"//{quote(str(self.root))}?{query}"

    def tier(
        self,
        num_blocks: int = 64,
        group: KVGroup = GROUP,
        coding: CodingConfig = DEFAULT_CODING,
        **options: object,
    ) -> BucketTier:
        """Open one process's tier. It reads the manifests of other writers only on request."""
        location = self.location(**{"poll_s": 0, "publish_s": 3600, **options})
        capacity_bytes = num_blocks * group.bytes_per_block
        tier = load_plugin("tiers", "dir")(
            StorageSite("dir", location, group, capacity_bytes, coding=coding)
        )
        assert isinstance(tier, BucketTier)
        return closed_later(tier)

    def objects(self) -> directory_module.Directory:
        return directory_module.Directory(read_location("dir", f"//{quote(str(self.root))}"))

    def paths(self, below: str = "") -> list[str]:
        """Return the paths of all files, temporary ones included."""
        found = (path for path in (self.root / below).rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.root)) for path in found)


def scratch(name: str, tmp_path: Path) -> Iterator[Path]:
    if name == "tmpfs":
        place = Path("/dev/shm") / f"kvtier-{uuid.uuid4().hex}"
        if not place.parent.is_dir():
            pytest.skip("no tmpfs at /dev/shm")
        place.mkdir()
        yield place
        shutil.rmtree(place)
    else:
        yield tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "kv")


class TestDirectoryTier(StorageSuite):
    """On the file system of the temporary folder: ext4, mostly."""

    options: dict[str, Any] = {}  # noqa: RUF012
    file_system = ""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> Iterator[None]:
        for self.place in scratch(self.file_system, tmp_path):  # noqa: B020
            yield

    def make_storage(self, num_blocks: int) -> StorageTier:
        self.folder = Folder(self.place / uuid.uuid4().hex)
        return self.folder.tier(num_blocks, **self.options)

    def reopen(self, storage: StorageTier) -> StorageTier:
        return self.folder.tier(storage.num_blocks, **self.options)

    def spoil(self, storage: StorageTier, key: BlockKey) -> bool:
        """Change the last byte."""
        assert isinstance(storage, BucketTier)
        (place,) = storage._catalogue.places(as_keys([key]))
        (at,) = place.at.tolist()
        path = self.folder.root / pack_path(place.pack)
        content = bytearray(path.read_bytes())
        content[storage._shape.offsets(place.num_blocks, place.coding)[at + 1] - 1] ^= 1
        path.write_bytes(content)
        return True

    @contextmanager
    def stall(self, storage: StorageTier, num_blocks: int) -> Iterator[None]:
        del storage, num_blocks
        with hanging("open"):
            yield

    def abandon(self, storage: StorageTier) -> bool:
        assert isinstance(storage, BucketTier)
        storage.abandon()
        return True

    def check(self, storage: StorageTier) -> None:
        assert isinstance(storage, BucketTier)
        storage.check_invariants()


class TestOnTmpfs(TestDirectoryTier):
    file_system = "tmpfs"


class TestEncrypted(TestDirectoryTier):
    @pytest.fixture(autouse=True)
    def _key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("cryptography")
        monkeypatch.setenv("KVTIER_ENCRYPTION_KEY", "06" * 32)


class TestLossless(TestDirectoryTier):
    options = {"coding": CodingConfig("lossless")}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("zstandard")


class TestTaggedSmallPacks(TestDirectoryTier):
    options = {"pack_bytes": 512}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _secret(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVTIER_STORE_SECRET", "a secret of the tests")


# -- faults ----------------------------------------------------------------------------------------


class FaultyOs:
    """The module ``os`` with one function replaced."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function

    def __getattr__(self, name: str) -> Any:
        return self._function if name == self._name else getattr(os, name)


@contextmanager
def replaced(name: str, function: Callable[..., Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory_module, "os", FaultyOs(name, function))
        yield


@contextmanager
def hanging(name: str) -> Iterator[None]:
    """Have a call wait until the end, as for an NFS server that does not answer."""
    is_over = threading.Event()
    right = getattr(os, name)

    def wait(*given: Any) -> Any:
        is_over.wait()
        return right(*given)

    try:
        with replaced(name, wait):
            yield
    finally:
        is_over.set()


@contextmanager
def failing(name: str, number: int) -> Iterator[None]:
    def fail(*given: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with replaced(name, fail):
        yield


def test_replicas_share_a_directory(folder: Folder) -> None:
    first, second = folder.tier(), folder.tier()
    assert User(first).put(0, 1, 2) == [THERE] * 3
    first.exchange(TIMEOUT_S)
    second.exchange(TIMEOUT_S)
    assert User(second).get(0, 1, 2) == [THERE] * 3
    User(first).drop(0, 1, 2, for_good=True)
    second.exchange(TIMEOUT_S)
    assert User(second).find(0, 1, 2) == [ABSENT] * 3
    assert not folder.paths("packs")


def test_models_share_a_directory(folder: Folder) -> None:
    larger = full_attention(2, 2, 16, DType.FLOAT16, 2)
    tiers = folder.tier(), folder.tier(group=larger)
    for number, tier in enumerate(tiers):
        assert User(tier).put(number) == [THERE]
        tier.exchange(TIMEOUT_S)
    for number, tier in enumerate(tiers):
        tier.exchange(TIMEOUT_S)
        assert User(tier).find(0, 1) == ([THERE, ABSENT] if not number else [ABSENT, THERE])
        assert User(tier).get(number) == [THERE]


def test_only_its_user_and_group_read_the_blocks(folder: Folder) -> None:
    before = os.umask(0o022)
    try:
        User(folder.tier()).put(0)
    finally:
        os.umask(before)
    paths = [folder.root, *folder.root.rglob("*")]
    assert {oct(path.stat().st_mode & 0o777) for path in paths} == {"0o750", "0o640"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("call", ["open", "write", "close"])
def test_store_that_takes_no_writes_is_read_and_logged_once(
    folder: Folder, call: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """NFS reports a full disk at the close."""
    tier = folder.tier()
    User(tier).put(0)
    right_open, right_close = os.open, os.close

    def open_(path: object, flags: int, *given: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, "no")
        return right_open(path, flags, *given)  # type: ignore[arg-type]

    def close(file: int) -> None:
        is_written = os.readlink(f"/proc/self/fd/{file}").rpartition("/")[2].startswith(".")
        right_close(file)
        if is_written:
            raise OSError(number, "no")

    def write(*given: object) -> int:
        raise OSError(number, "no")

    faults: dict[str, Callable[..., Any]] = {"open": open_, "close": close, "write": write}
    with replaced(call, faults[call]):
        for key in range(1, 5):
            assert User(tier).put(key) == [FAILED]
            assert User(tier).get(0) == [THERE]
    assert folder.paths("packs") == [path for path in folder.paths("packs") if "/." not in path]
    assert sum("only read" in line.message for line in caplog.records) == 1
    assert os.strerror(number) in tier.findings()[1].found
    tier._upkeep._next_write_s = 0.0
    assert User(tier).put(1) == [THERE]
    assert tier.findings()[1].found == "in use"


def test_stale_handle_is_opened_again(folder: Folder) -> None:
    tier = folder.tier()
    User(tier).put(0)
    left = [2]

    def preadv(*given: Any) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "stale")
        return os.preadv(*given)

    with replaced("preadv", preadv):
        assert User(tier).get(0) == [THERE]
    assert not left[0]
    with failing("open", errno.ESTALE):
        assert User(tier).get(0) == [ABSENT], "its file was replaced again and again"


def test_file_that_is_gone_is_a_miss_and_a_folder_that_is_gone_an_outage(folder: Folder) -> None:
    tier = folder.tier(publish_s=0.01)
    user = User(tier)
    user.put(0, 1)
    wait_until(lambda: not tier._exchange.num_pending)
    shutil.rmtree(folder.root / "packs")
    assert user.get(0) == [ABSENT]
    assert user.put(0, 1) == user.get(0, 1) == [THERE] * 2
    folder.root.rename(folder.root.with_name("away"))
    assert user.get(0) == user.put(2) == [FAILED]
    assert not folder.root.exists(), "a mount that is gone is not written below"
    folder.root.with_name("away").rename(folder.root)
    assert user.get(0) == [THERE]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_torn_file_is_a_miss(folder: Folder, share: float, has_zeros: bool) -> None:
    """As after a power cut: the beginning is there, and the rest is missing or zeros."""
    writer = folder.tier()
    User(writer).put(*range(4))
    writer.exchange(TIMEOUT_S)
    (path,) = folder.paths("packs")
    content = (folder.root / path).read_bytes()
    torn = content[: int(share * len(content))]
    (folder.root / path).write_bytes(torn + bytes(len(content) - len(torn)) * has_zeros)
    tier = folder.tier()
    assert User(tier).get(*range(4))[3] != THERE
    assert User(tier).put(*range(4)) == User(tier).get(*range(4)) == [THERE] * 4


def test_nothing_is_seen_of_a_writer_that_was_killed(folder: Folder) -> None:
    script = f"""
import os, signal
from kvtier.testing.storage_suite import GROUP
from kvtier.testing.storage_user import User, stored_key
from kvtier.tiers import StorageSite
from kvtier.tiers.remote.bucket import directory
from kvtier.tiers.remote.bucket.opening import make_directory
tier = make_directory(StorageSite("dir", {folder.location()!r}, GROUP, 1 << 20))
User(tier).put(0)
tier.exchange(10)
def write(file, content):
    os.write(file, content[:100])
    os.kill(os.getpid(), signal.SIGKILL)
directory._write = write
User(tier).put(1)
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert ended.returncode == -9
    (left,) = [path for path in folder.paths() if "/." in path]
    tier = folder.tier()
    assert User(tier).find(0, 1) == [THERE, ABSENT]
    listed = [each.path for each in asyncio.run(folder.objects().listed("packs"))]
    assert len(listed) == 1
    assert left in folder.paths(), "its writer may be slow"
    old = time.time() - 2 * directory_module.LEFTOVER_S
    os.utime(folder.root / left, (old, old))
    asyncio.run(folder.objects().listed("packs"))
    assert left not in folder.paths()


def test_repeated_request_to_make_a_link_is_no_conflict(folder: Folder) -> None:
    objects = folder.objects()
    asyncio.run(objects.self_test())
    right = Path.hardlink_to

    def twice(self: Path, target: Path) -> None:
        right(self, target)
        right(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "hardlink_to", twice)
        asyncio.run(objects.put("some", b"1", create=True))
    with pytest.raises(Taken):
        asyncio.run(objects.put("some", b"2", create=True))
    assert asyncio.run(objects.get("some")) == b"1"
    assert folder.paths() == ["self-test/probe", "some"]


def test_file_system_without_hard_links_is_refused(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with pytest.raises(ConfigError, match="is on a file system without hard links"):
        folder.tier()


def test_process_ends_though_a_server_does_not_answer(folder: Folder) -> None:
    script = f"""
import os, threading
from kvtier.testing.storage_suite import GROUP
from kvtier.testing.storage_user import User, stored_key
from kvtier.tiers import StorageSite
from kvtier.tiers.remote.bucket import directory
from kvtier.tiers.remote.bucket.opening import make_directory
tier = make_directory(StorageSite("dir", {folder.location()!r}, GROUP, 1 << 20))
User(tier).put(0)
directory._read = lambda *given: threading.Event().wait()
assert [each.value for each in User(tier, timeout_s=0.2).get(0)] == ["failed"]
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.fixture
def mounts() -> list[str]:
    """Return the beginning of a command that may mount file systems."""
    command = ["unshare", "-rm"]
    try:
        told = subprocess.run(
            [*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
        )
    except FileNotFoundError:
        told = None
    if told is None or told.returncode:
        pytest.skip("this kernel lets no user mount a file system (unshare -rm)")
    return command


def test_full_and_read_only_file_systems_serve_hits(mounts: list[str]) -> None:
    script = """
import logging, subprocess
from kvtier.layout import DType, full_attention
from kvtier.testing.storage_user import User
from kvtier.tiers import StorageSite
from kvtier.tiers.remote.bucket.opening import make_directory
logging.basicConfig(level=logging.WARNING)
large = full_attention(8, 8, 64, DType.FLOAT16, 64)
site = StorageSite("dir", "///mnt/kv?poll_s=0.1&publish_s=0.1", large, 64 << 20)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", "/mnt"], check=True)
tier = make_directory(site)
user = User(tier)
stored = [number for number in range(20) if user.put(number)[0].value == "there"]
assert 2 < len(stored) < 8, stored
assert "No space left" in tier.findings()[1].found, tier.findings()
assert all(each.value == "there" for each in user.get(*stored))
tier.close()
subprocess.run(["mount", "-o", "remount,ro,size=8m", "tmpfs", "/mnt"], check=True)
reader = make_directory(site)
user = User(reader)
found = user.found(*range(20))
assert found and set(found) <= set(stored), found
assert all(each.value == "there" for each in user.get(*found))
assert [each.value for each in user.put(30, 31)] == ["failed"] * 2
assert "Read-only" in reader.findings()[1].found, reader.findings()
reader.close()
print(len(found))
"""
    ended = subprocess.run(
        [*mounts, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0
    assert ended.stderr.count("the store is only read") == 2, "once for each of the two"


# -- opening ---------------------------------------------------------------------------------------


def site(location: str) -> StorageSite:
    return StorageSite("far", location, GROUP, 4 * GROUP.bytes_per_block)


@pytest.mark.parametrize(
    ("location", "sentence"),
    [
        ("//mnt/kv", 'mnt/kv is no absolute path; write three slashes, as in "dir:///mnt/kv"'),
        ("mnt/kv", 'no place; write it as "dir:///mnt/shared/kv"'),
        ("///", "names no directory"),
        ("///mnt/../etc", "names no directory"),
        ("///no/such/place", "there is no folder /no/such; make it, or mount what has it"),
        ("///etc/hostname", "/etc/hostname is no folder; name another one"),
        ("///proc/kv", "/proc/kv"),
        ("///mnt/kv?endpoint=http://x", "no option is called 'endpoint'"),
        ("///mnt/kv?requests=0", "requests is 1 at least"),
        ("///mnt/kv?capacity=1GiB&poll_s=0", "a capacity needs poll_s above 0"),
    ],
)
def test_place_that_can_not_be_meant_is_one_sentence(location: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_directory(site(location))
    assert sentence in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """As with root_squash, by which root is nobody."""
    script = f"""
import encodings.idna, os
from kvtier.core.errors import ConfigError
from kvtier.testing.storage_suite import GROUP
from kvtier.tiers import StorageSite
from kvtier.tiers.remote.bucket import directory, tier
from kvtier.tiers.remote.bucket.opening import make_directory
os.setgroups([]); os.setresuid(65534, 65534, 65534)
try:
    make_directory(StorageSite("dir", "//{tmp_path}/kv", GROUP, 1 << 20))
except ConfigError as error:
    print(error)
"""
    for path in (tmp_path, *tmp_path.parents):
        if str(path).startswith("/tmp/"):
            path.chmod(0o755)
    (tmp_path / "kv").mkdir(0o755)
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout.strip().startswith(
        f"storage: dir://{tmp_path}/kv: user 65534 may not write"
    )
    assert "root_squash" in ended.stdout


# -- maintenance -----------------------------------------------------------------------------------


def test_blocks_are_pruned_and_migrated(folder: Folder, bucket: Bucket, tmp_path: Path) -> None:
    tier = folder.tier()
    User(tier).put(0, 1)
    tier.exchange(TIMEOUT_S)
    back = Folder(tmp_path / "back")
    route = (f"dir:{folder.location()}", f"s3:{bucket.location()}", f"dir:{back.location()}")
    for source, target in pairwise(route):
        migrate(StoreAccess(source), StoreAccess(target), lambda done, num: None)
    assert User(back.tier()).get(0, 1) == [THERE] * 2
    keeper = make_keeper(f"dir:{folder.location()}")
    assert "ms a request" in keeper.test()
    assert prune(keeper, older_than_s=0).num_entries == 1
    assert not folder.paths("packs")
    assert not folder.paths("manifests")


def test_command_checks_a_directory(folder: Folder) -> None:
    told = CliRunner().invoke(app, ["remote", "check", f"dir://{folder.root}"])
    assert told.exit_code == 0
    assert "ms a request" in told.stdout
    told = CliRunner().invoke(app, ["remote", "check", "dir:///no/such/place"])
    assert told.exit_code == 2
    assert "there is no folder /no/such" in told.stderr


def test_errors_of_the_objects(folder: Folder) -> None:
    objects = folder.objects()
    asyncio.run(objects.self_test())
    with pytest.raises(Missing):
        asyncio.run(objects.get("nothing"))
    for number in (errno.EIO, errno.ETIMEDOUT):
        with failing("open", number), pytest.raises(Unreachable, match=os.strerror(number)):
            asyncio.run(objects.get("self-test/probe"))
    with failing("open", errno.EROFS), pytest.raises(Unwritable):
        asyncio.run(objects.put("some", b"1"))
    shutil.rmtree(folder.root)
    with pytest.raises(Unreachable):
        asyncio.run(objects.listed("packs"))


# -- capacity --------------------------------------------------------------------------------------


def pack_bytes_of(tier: BucketTier, num_blocks: int = 1) -> int:
    return int(tier._shape.offsets(num_blocks)[-1])


def used_bytes(folder: Folder) -> int:
    num_bytes = 0
    for path in folder.paths("packs"):
        with suppress(FileNotFoundError):
            num_bytes += (folder.root / path).stat().st_size
    return num_bytes


FAST: dict[str, Any] = {"poll_s": 0.05, "publish_s": 0.02, "pack_bytes": 512}


def test_directory_stays_within_its_capacity(folder: Folder) -> None:
    """Four writers write five times the capacity; all keep what was written last."""
    capacity = 40 * 4352
    tiers = [folder.tier(256, capacity=capacity, **FAST) for _ in range(4)]
    wait_until(lambda: any(tier._upkeep.merger.is_merger for tier in tiers))
    largest = 0
    for number in range(200):
        tier = tiers[number % 4]
        wait_until(lambda tier=tier, number=number: User(tier).put(number) == [THERE])  # type: ignore[misc]
        largest = max(largest, used_bytes(folder))
    assert largest <= capacity + 2 * len(tiers) * pack_bytes_of(tiers[0])
    wait_until(lambda: used_bytes(folder) <= capacity)
    late = folder.tier(256, capacity=capacity, **FAST)
    for tier in (*tiers, late):
        wait_until(lambda tier=tier: set(User(tier).found(*range(200))) >= set(range(190, 200)))  # type: ignore[misc]
        assert len(User(tier).found(*range(200))) <= 60, "what was deleted is known to be"
        assert set(User(tier).get(*range(190, 200))) == {THERE}
        tier.check_invariants()


def test_what_is_used_stays(folder: Folder) -> None:
    first = folder.tier(256, pack_bytes=512)
    User(first).put(*range(30))
    first.close()
    paths = folder.paths("packs")
    for at, path in enumerate(paths):
        used_s = time.time() - 7200 + at
        os.utime(folder.root / path, (used_s, used_s))
    tier = folder.tier(256, capacity=20 * pack_bytes_of(first, 2), **FAST)
    user = User(tier)
    wait_until(lambda: tier._objects.touch_s > 0)
    oldest = next(
        number
        for number in range(30)
        if pack_path(tier._catalogue.places(as_keys([stored_key(number)]))[0].pack) == paths[0]
    )
    assert user.get(oldest) == [THERE]
    for number in range(100, 110):
        wait_until(lambda number=number: user.put(number) == [THERE])  # type: ignore[misc]
    wait_until(lambda: paths[1] not in folder.paths("packs"))
    assert user.get(oldest) == [THERE], "it was used last"
    wait_until(lambda: used_bytes(folder) <= 20 * pack_bytes_of(first, 2))


def test_use_is_recorded_seldom(folder: Folder) -> None:
    objects = folder.objects()
    asyncio.run(objects.self_test())
    path = folder.root / "self-test" / "probe"
    begin = time.time() - 100
    os.utime(path, (begin, begin))
    asyncio.run(objects.get("self-test/probe"))
    assert path.stat().st_mtime == pytest.approx(begin), "there is no capacity"
    objects.touch_s = 200.0
    asyncio.run(objects.get("self-test/probe"))
    assert path.stat().st_mtime == pytest.approx(begin)
    objects.touch_s = 60.0
    asyncio.run(objects.get("self-test/probe"))
    assert path.stat().st_mtime > begin + 50
    with failing("utime", errno.EROFS):
        assert asyncio.run(objects.get("self-test/probe"))


def test_packs_of_a_killed_process_and_of_other_models_count(folder: Folder) -> None:
    larger = full_attention(2, 2, 16, DType.FLOAT16, 2)
    lost = folder.tier(pack_bytes=512)
    for number in range(100, 115):
        User(lost).put(number)
    lost.abandon()
    capacity = 20 * 4352
    tiers = [folder.tier(256, group=group, capacity=capacity, **FAST) for group in (GROUP, larger)]
    wait_until(lambda: any(tier._upkeep.merger.is_merger for tier in tiers))
    for number in range(60):
        tier = tiers[number % 2]
        wait_until(lambda tier=tier, number=number: User(tier).put(number) == [THERE])  # type: ignore[misc]
    wait_until(lambda: used_bytes(folder) <= capacity)
    assert User(tiers[0]).get(58) == User(tiers[1]).get(59) == [THERE]


def test_manifests_do_not_tell_of_deleted_packs_for_ever(folder: Folder) -> None:
    tier = folder.tier(256, capacity=10 * 4352, **FAST)
    wait_until(lambda: tier._upkeep.merger.is_merger)
    for number in range(150):
        wait_until(lambda number=number: User(tier).put(number) == [THERE])  # type: ignore[misc]
    tier.close()
    late = folder.tier(256)
    assert len(User(late).found(*range(150))) < 100


def test_process_without_a_capacity_leaves_the_packs_to_one_that_has(folder: Folder) -> None:
    without = folder.tier(256, **FAST)
    wait_until(lambda: without._upkeep.merger.is_merger)
    bounded = folder.tier(256, capacity=10 * 4352, **FAST)
    wait_until(lambda: bounded._upkeep.merger.is_merger)
    for number in range(40):
        assert User(without).put(number) == [THERE]
    wait_until(lambda: used_bytes(folder) <= 10 * 4352)
    assert bounded._upkeep.merger.is_merger
    assert bounded.findings()[2].found == "0.00 of 0.00 GiB"
    assert len(without.findings()) == 2


def test_capacity_below_four_packs_is_refused(folder: Folder) -> None:
    with pytest.raises(ConfigError, match="is below 4 packs of 1,048,576 bytes; raise it"):
        folder.tier(capacity="2MiB", pack_bytes="1MiB")
