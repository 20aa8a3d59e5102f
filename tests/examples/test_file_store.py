"""Somebody else's storage tier: installed, found by its entry point, and used as any other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "file_store"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages, with the example's in it."""
    folder = tmp_path_factory.mktemp("site")
    source = folder / "source"  # a build leaves things where it is done
    shutil.copytree(PACKAGE, source)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "site")]
    subprocess.run([*command, str(source)], check=True, capture_output=True, text=True)
    return folder / "site"


def run(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Python where the package is installed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_it_is_one_file_of_less_than_200_lines() -> None:
    [module] = PACKAGE.glob("*.py")
    assert len(module.read_text(encoding="utf-8").splitlines()) < 200


SUITE = """
from pathlib import Path

import pytest

from kvtier.testing import StorageSuite
from kvtier.core.system.plugins import load_plugin
from kvtier.tiers import StorageSite, StorageTier


class TestFileStore(StorageSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.tmp_path, self.num_made = tmp_path, 0

    def make_storage(self, num_blocks: int) -> StorageTier:
        self.num_made += 1
        folder = self.tmp_path / str(self.num_made)
        capacity_bytes = num_blocks * self.group.bytes_per_block
        self.site = StorageSite("files", str(folder), self.group, capacity_bytes)
        return load_plugin("tiers", "files")(self.site)

    def reopen(self, storage: StorageTier) -> StorageTier:
        return load_plugin("tiers", "files")(self.site)

    def spoil(self, storage: StorageTier, key: bytes) -> bool:
        [path] = storage.folder.glob(f"*/*/{key.hex()}.kv")
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        return True

    def abandon(self, storage: StorageTier) -> bool:
        storage.close()  # an end of the process does no more
        return True


def test_a_file_that_is_cut_short_is_no_block(tmp_path: Path) -> None:
    suite = TestFileStore()
    suite.tmp_path, suite.num_made = tmp_path, 0
    from kvtier.testing.storage_user import User
    from kvtier.tiers import Outcome

    storage = suite.make_storage(2)
    User(storage).put(1)
    [path] = storage.folder.glob("*/*/*.kv")
    path.write_bytes(path.read_bytes()[:-1])
    assert User(storage).get(1) == [Outcome.DAMAGED]
    assert not path.exists()
    storage.close()
"""


@pytest.mark.slow
def test_it_passes_the_suite_of_storage_tiers(site: Path, tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")
    done = run(
        site, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", ".", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


SERVE = """
import sys
from pathlib import Path

from kvtier.cache.tokens import Cache
from kvtier.core.config import CacheConfig
from kvtier.core.types import DEVICE, DISK, HOST
from tests.cache.tokens.harness import GROUP, Harness

LONG, NS = [*[1] * 8, 9], b"n" * 32
folder = Path(sys.argv[1])
SLOTS = {"host_capacity": 20 * GROUP.bytes_per_block, "strict": True}


def make() -> Harness:
    # The tests' harness, with a cache whose tiers are those that its configuration names.
    harness = Harness()
    harness.cache.close()
    config = CacheConfig(
        disk_path=str(folder / "slab"),
        disk_capacity="1MiB",
        storage=(f"files:{folder / 'files'}",),
        storage_capacity=100 * GROUP.bytes_per_block,
        codec=sys.argv[2],
        encryption_key=sys.argv[3],
        **SLOTS,
    )
    harness.cache = Cache(config, harness.device, harness.pool, harness.clock)
    assert list(harness.cache._tiers) == [DEVICE, HOST, DISK, "files"]
    return harness


def serve(harness: Harness) -> dict[str, int]:
    request = harness.start(LONG, NS)
    harness.check_request(request)
    harness.compute(request, 4)
    harness.cache.commit(request.lease, 4)
    harness.release(request)
    assert harness.cache.drain()
    harness.cache.check_invariants()
    return request.lease.record.hit_blocks


harness = make()
assert serve(harness) == {}
assert (harness.held(DISK), harness.held("files")) == (4, 4)
assert len(list((folder / "files").glob("*/*/*.kv"))) == 4
for tier in (DEVICE, HOST, DISK):
    harness.cache.clear(tier)
assert harness.matched(LONG, NS) == ["files"] * 4
assert serve(harness) == {"files": 4}, "a hit does not cross the disk"
harness.cache.close()

for path in (folder / "slab").iterdir():
    path.unlink()
harness = make()
assert serve(harness) == {"files": 4}, "the next process finds them"
harness.cache.close()
print("served")
"""


@pytest.mark.parametrize("coding", [("none", "none"), ("lossless", "env:OUR_KEY")])
def test_it_serves_blocks_beside_the_disk_and_after_a_restart(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coding: tuple[str, str]
) -> None:
    """Also compressed and encrypted, of which it knows nothing."""
    if "lossless" in coding:
        pytest.importorskip("zstandard")
        pytest.importorskip("cryptography")
    monkeypatch.setenv("OUR_KEY", "01" * 32)
    code = textwrap.dedent(SERVE)
    done = run(site, "-W", "error", "-c", code, str(tmp_path), *coding, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "served\n"


@pytest.mark.parametrize(
    ("storage", "capacity", "sentence"),
    [
        (["files:"], "1GiB", 'files: no folder; write it as "files:/path"'),
        (["files:f"], "5", "files: a capacity of 5 bytes is below one block"),
        (["files:f", "files:g"], "1GiB", "storage: two tiers are called 'files'"),
        (["host=files:f"], "1GiB", "storage: two tiers are called 'host'"),
        (["kettle:f"], "1GiB", "no plug-in 'kettle' in kvtier.tiers; known: disk, files"),
    ],
)
def test_storage_that_cant_be_used_is_told_in_one_sentence(
    site: Path, tmp_path: Path, storage: list[str], capacity: str, sentence: str
) -> None:
    code = textwrap.dedent(
        f"""
        from kvtier.cache.tokens import Cache
        from kvtier.core.config import CacheConfig
        from kvtier.core.errors import ConfigError
        from tests.cache.tokens.harness import Harness

        harness = Harness()
        config = CacheConfig(
            host_capacity="1MiB", storage={tuple(storage)!r}, storage_capacity={capacity!r}
        )
        try:
            Cache(config, harness.device, harness.pool)
        except ConfigError as error:
            print(error)
        """
    )
    done = run(site, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sentence in done.stdout
