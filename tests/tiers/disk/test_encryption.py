"""Encrypted slabs: what is on the disk, keys that change, and keys that are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.core.errors import ConfigError
from kvtier.layout import opaque
from kvtier.testing.storage_user import User, stored_bytes, stored_key
from kvtier.tiers import Outcome
from kvtier.tiers.disk import Direct, DiskOptions, DiskReader, DiskTier
from kvtier.tools.cli import app

pytest.importorskip("cryptography")

THERE, ABSENT, DAMAGED, FAILED = Outcome
BLOCK_BYTES = 16 << 10
GROUP = opaque(BLOCK_BYTES)
NUMBERS = range(5)
WORDS = ("inspect", "verify")


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST", "01" * 32)
    monkeypatch.setenv("SECOND", "02" * 32)
    monkeypatch.setenv("BOTH", "02" * 32 + "\n" + "01" * 32)


def open_slab(path: Path, key: str, num_parts: int = 1, direct: Direct = Direct.AUTO) -> DiskTier:
    first, *others = (path / str(part) for part in range(num_parts))
    source = f"env:{key}" if key else ""
    options = DiskOptions(first, 1 << 20, tuple(others), encryption_key=source, direct=direct)
    return DiskTier(options, GROUP)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_no_bytes_of_a_block_are_on_the_disk(tmp_path: Path, num_parts: int) -> None:
    for key in ("", "FIRST"):
        folder = tmp_path / (key or "plain")
        tier = open_slab(folder, key, num_parts)
        assert User(tier).put(*NUMBERS) == [THERE] * 5
        assert tier.scrub(1 << 30).num_damaged == 0
        tier.close()
        content = b"".join((each / "data.slab").read_bytes() for each in folder.iterdir())
        pieces = [stored_bytes(stored_key(at), BLOCK_BYTES)[:64] for at in NUMBERS]
        assert all((piece in content) != bool(key) for piece in pieces)
        tier = open_slab(folder, key, num_parts)
        assert User(tier).get(*NUMBERS) == [THERE] * 5
        tier.close()


def test_more_blocks_than_the_buffer_holds(tmp_path: Path) -> None:
    options = DiskOptions(tmp_path, 4 << 20, encryption_key="env:FIRST", bounce_bytes=64 << 10)
    tier = DiskTier(options, GROUP)
    assert User(tier).put(*range(50)) == [THERE] * 50
    assert User(tier).get(*range(50)) == [THERE] * 50
    tier.close()


def test_rotated_key_reads_old_blocks_and_one_that_is_left_out_misses_them(tmp_path: Path) -> None:
    tier = open_slab(tmp_path, "FIRST")
    User(tier).put(*NUMBERS)
    tier.close()
    tier = open_slab(tmp_path, "BOTH")
    assert User(tier).get(*NUMBERS) == [THERE] * 5
    User(tier).put(5, 6)
    tier.close()
    tier = open_slab(tmp_path, "SECOND")
    user = User(tier)
    assert user.get(*NUMBERS, 5, 6) == [ABSENT] * 5 + [THERE] * 2
    assert user.find(0) == [ABSENT], "it is not read again and again"
    assert user.put(*NUMBERS) == user.get(*NUMBERS) == [THERE] * 5
    tier.close()


def test_wrong_and_missing_keys_are_one_sentence(tmp_path: Path) -> None:
    tier = open_slab(tmp_path / "sealed", "FIRST")
    User(tier).put(*NUMBERS)
    tier.close()
    with pytest.raises(ConfigError, match="is encrypted, and no key is given"):
        open_slab(tmp_path / "sealed", "")
    for _ in range(2):  # and nothing was changed
        with pytest.raises(ConfigError, match="encrypted with the key [0-9a-f]{8}, which"):
            open_slab(tmp_path / "sealed", "SECOND")
    tier = open_slab(tmp_path / "sealed", "FIRST")
    assert User(tier).get(*NUMBERS) == [THERE] * 5
    tier.close()
    open_slab(tmp_path / "plain", "").close()
    with pytest.raises(ConfigError, match="is not encrypted, and encryption_key is given"):
        open_slab(tmp_path / "plain", "FIRST")
    with pytest.raises(ConfigError, match="disk_direct"):
        open_slab(tmp_path / "direct", "FIRST", direct=Direct.ON)


def test_readers_of_the_slab_decrypt(tmp_path: Path) -> None:
    tier = open_slab(tmp_path, "FIRST")
    User(tier).put(*NUMBERS)
    options = DiskOptions(tmp_path / "0", 1 << 20, encryption_key="env:FIRST")
    reader = DiskReader(options, GROUP)
    assert User(reader).get(*NUMBERS, 9) == [THERE] * 5 + [ABSENT]
    reader.close()
    tier.close()


def test_block_swapped_with_another_is_not_believed(tmp_path: Path) -> None:
    tier = open_slab(tmp_path, "FIRST")
    user = User(tier)
    user.put(1, 2)
    held = tier._slots_with([stored_key(1), stored_key(2)]).tolist()
    size = tier.blocks.parts[0].slot_bytes
    with (tmp_path / "0" / "data.slab").open("r+b") as file:
        contents = []
        for slot in held:
            file.seek(slot * size)
            contents.append(file.read(size))
        for slot, content in zip(held, reversed(contents), strict=True):
            file.seek(slot * size)
            file.write(content)
    assert user.get(1, 2) == [DAMAGED] * 2
    tier.close()


def test_inspect_and_verify_need_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    tier = open_slab(tmp_path, "FIRST")
    User(tier).put(*NUMBERS)
    tier.close()
    told = {word: CliRunner().invoke(app, [word, str(tmp_path / "0")]) for word in WORDS}
    assert all(each.exit_code == 0 for each in told.values())
    assert "5 of" in told["inspect"].output
    assert "AES-256-GCM" in told["inspect"].output
    assert "not what they decrypt to" in told["verify"].output
    assert "nothing is wrong" in told["verify"].output
    with (tmp_path / "0" / "data.slab").open("r+b") as file:
        file.seek(100)
        file.write(b"x")
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "0")]).exit_code == 1
