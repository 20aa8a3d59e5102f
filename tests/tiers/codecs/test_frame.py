"""Stored forms of blocks: every change is detected, and keys are derived as specified."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from kvtier.core.config import CodingConfig
from kvtier.core.errors import ConfigError
from kvtier.layout import opaque
from kvtier.testing.codec_suite import KINDS
from kvtier.testing.storage_user import Scattered, cuts, stored_key
from kvtier.tiers import Outcome
from kvtier.tiers.codecs import BlockCoder, make_coder
from kvtier.tiers.codecs.codec import Uint8s
from kvtier.tiers.codecs.encryption import KEY_VARIABLE, Keyring, key_id, read_keyring
from kvtier.tiers.codecs.frame import (
    HEAD_BYTES,
    MAX_OVERHEAD,
    CodecChoice,
    CodecCounts,
    FrameHead,
)
from tests.kit.effort import effort

pytest.importorskip("zstandard")
pytest.importorskip("cryptography")

THERE, ABSENT, DAMAGED, FAILED = Outcome
BLOCK_BYTES = 8 << 10
NUM_CHANGED = effort(100_000)
KEYS = [stored_key(number) for number in range(8)]
FIRST, SECOND = bytes(range(32)), bytes(range(1, 33))
CODERS = {
    "lossless": CodingConfig("lossless"),
    "encrypted": CodingConfig("none", "env:OUR_KEY"),
    "both": CodingConfig("lossless", "env:OUR_KEY"),
}
each_coder = pytest.mark.parametrize("name", list(CODERS))


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_KEY", FIRST.hex())
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def memory_of(kind: str, num: int = 1, cut: str = "unequal pieces") -> Scattered:
    """Return ``num`` blocks in pieces."""
    memory = Scattered(num, cuts(BLOCK_BYTES)[cut])
    for at in range(num):
        memory.write(at, content_of(kind, at))
    return memory


def content_of(kind: str, at: int = 0) -> bytes:
    return KINDS[kind][at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES].tobytes()


def frame_of(coder: BlockCoder, memory: Scattered, at: int = 0) -> Uint8s:
    into = np.zeros(coder.most_bytes, np.uint8)
    head = coder.encode(KEYS[at], memory.pieces.pick([at]), into)
    assert head is not None
    return into[: head.num_bytes].copy()


@each_coder
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "float8", "zeros"])
@pytest.mark.parametrize("cut", list(cuts(BLOCK_BYTES)))
def test_block_comes_back_whatever_lies_in_pieces(name: str, kind: str, cut: str) -> None:
    coder = make_coder(CODERS[name], opaque(BLOCK_BYTES))
    memory = memory_of(kind, 1, cut)
    frame = frame_of(coder, memory)
    memory.clear()
    assert coder.decode(KEYS[0], frame, memory.pieces) is THERE
    assert memory.read(0) == content_of(kind)
    memory.check_around()


def test_block_that_does_not_shrink_is_stored_as_it_is() -> None:
    memory, into = memory_of("random"), np.zeros(BLOCK_BYTES + MAX_OVERHEAD, np.uint8)
    plain = make_coder(CODERS["lossless"], opaque(BLOCK_BYTES))
    assert plain.encode(KEYS[0], memory.pieces, into) is None
    assert plain.counts.num_kept == 1
    head = make_coder(CODERS["both"], opaque(BLOCK_BYTES)).encode(KEYS[0], memory.pieces, into)
    assert head is not None
    assert (head.codec, head.num_bytes) == (0, BLOCK_BYTES + MAX_OVERHEAD)


@pytest.mark.slow
@each_coder
def test_nothing_changed_becomes_a_wrong_byte(name: str) -> None:
    """Flip, truncate, swap and mix frames."""
    coder, rng = make_coder(CODERS[name], opaque(BLOCK_BYTES)), random.Random(3)
    num = len(KEYS)
    memory = memory_of("bfloat16", num)
    frames = [frame_of(coder, memory, at) for at in range(num)]
    again = Scattered(1, cuts(BLOCK_BYTES)["unequal pieces"])
    seen = dict.fromkeys(Outcome, 0)
    for turn in range(NUM_CHANGED):
        at = turn % num
        frame = frames[at].copy()
        if turn % 4 == 0:
            frame = frames[at - rng.randrange(1, num)].copy()
        elif turn % 4 == 1:
            frame = frame[: rng.randrange(len(frame))].copy()
        elif turn % 8 == 2:  # the header of one, the body of another
            frame[HEAD_BYTES : 4 * HEAD_BYTES] = frames[at - 1][HEAD_BYTES : 4 * HEAD_BYTES]
        else:
            bit = rng.randrange(8 * (len(frame) if turn % 2 else HEAD_BYTES + 24))
            frame[bit // 8] ^= 1 << bit % 8
        if turn % 4 == 0 and not coder.is_encrypting:
            continue  # the header in front of it names the block: see test_coded_store
        outcome = coder.decode(KEYS[at], frame, again.pieces)
        seen[outcome] += 1
        if outcome is THERE:
            assert again.read(0) == content_of("bfloat16", at), "wrong bytes"
            assert not coder.is_encrypting, "a changed frame was believed"
    again.check_around()
    assert seen[DAMAGED] > 0.7 * sum(seen.values())
    assert not seen[FAILED]


def test_frame_of_another_key_or_codec_is_a_miss_and_changes_no_memory() -> None:
    memory = memory_of("bfloat16")
    both, plain = (make_coder(CODERS[name], opaque(BLOCK_BYTES)) for name in ("both", "lossless"))
    other = BlockCoder(BLOCK_BYTES, keyring=Keyring([SECOND]))
    no_codec = BlockCoder(BLOCK_BYTES)
    sealed, packed = frame_of(both, memory), frame_of(plain, memory)
    memory.clear()
    for coder, frame in ((other, sealed), (plain, sealed), (both, packed), (no_codec, packed)):
        assert coder.decode(KEYS[0], frame, memory.pieces) is ABSENT
        assert memory.is_untouched(0)


def test_place_is_authenticated() -> None:
    memory, ring = memory_of("bfloat16"), Keyring([FIRST])
    first, second = (BlockCoder(BLOCK_BYTES, keyring=ring, place=each) for each in ("0/2", "1/2"))
    frame = frame_of(first, memory)
    assert second.decode(KEYS[0], frame, memory.pieces) is DAMAGED
    assert first.decode(KEYS[1], frame, memory.pieces) is DAMAGED
    assert first.decode(KEYS[0], frame, memory.pieces) is THERE


def test_rotated_key_reads_what_was_written_before() -> None:
    memory = memory_of("bfloat16")
    old = BlockCoder(BLOCK_BYTES, keyring=Keyring([FIRST]))
    new = BlockCoder(BLOCK_BYTES, keyring=Keyring([SECOND, FIRST]))
    frame = frame_of(old, memory)
    memory.clear()
    assert new.decode(KEYS[0], frame, memory.pieces) is THERE
    head = FrameHead.read(frame_of(new, memory))
    assert head is not None
    assert head.key_id == key_id(SECOND)


def test_nonces_and_bytes_never_repeat() -> None:
    memory = memory_of("bfloat16")
    coder = make_coder(CODERS["both"], opaque(BLOCK_BYTES))
    frames = [frame_of(coder, memory) for _ in range(100)]
    heads = [FrameHead.read(frame) for frame in frames]
    assert len({head.nonce for head in heads if head}) == 100
    assert len({frame[HEAD_BYTES:].tobytes() for frame in frames}) == 100


@pytest.mark.parametrize(
    ("secret", "known", "expected"),
    [
        (b"\x01", b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (
            b"\x03",
            b"c2sp.org/XAES-256-GCM",
            "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d",
        ),
    ],
)
def test_encryption_is_xaes_256_gcm(secret: bytes, known: bytes, expected: str) -> None:
    """Test vectors of c2sp.org/XAES-256-GCM, with and without a carry in the derived key."""
    plain, into = b"XAES-256-GCM", bytearray(28)
    ring, nonce = Keyring([32 * secret]), b"ABCDEFGHIJKLMNOPQRSTUVWX"
    ring.seal(nonce, known, memoryview(plain), memoryview(into))
    assert into.hex() == expected
    again = bytearray(12)
    assert ring.open(ring.current, nonce, known, memoryview(into), memoryview(again))
    assert again == plain
    assert not ring.open(ring.current, nonce, b"x", memoryview(into), memoryview(again))


# -- keys ------------------------------------------------------------------------------------------


def test_keys_come_from_a_file_a_variable_or_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"# since May\n{SECOND.hex()}\n\n{FIRST.hex().upper()}\n"
    (tmp_path / "keys").write_text(text)
    monkeypatch.setenv("SOME_KEYS", text)
    for source in (f"file:{tmp_path / 'keys'}", "env:SOME_KEYS", f"command:cat {tmp_path}/keys"):
        ring = read_keyring(source)
        assert ring is not None
        assert ring.current == key_id(SECOND)
        assert ring.has(key_id(FIRST))
    assert read_keyring("") is None
    monkeypatch.setenv(KEY_VARIABLE, FIRST.hex())
    ring = read_keyring("")
    assert ring is not None
    assert ring.current == key_id(FIRST)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("keys", "names no source of keys"),
        ("env:", "names no source of keys"),
        (FIRST.hex(), "names no source of keys"),
        (f"hex:{FIRST.hex()}", "names no source of keys"),
        (f"env:{FIRST.hex()}", "gives no key"),
        (f"file:{FIRST.hex()}", "No such file"),
        ("command:true --password sesame", "the command gives no key"),
        ("file:/dev/null", "give a regular file"),
        ("env:NO_SUCH", "gives no key"),
        ("env:SHORT", "64 hexadecimal digits"),
        ("env:WORDS", "64 hexadecimal digits"),
        ("env:TWICE", "given twice"),
        ("file:/no/such/file", "No such file"),
        ("command:false", "ended with 1"),
        ("command:/no/such/program", "No such file"),
        ("command:'", "can't be parsed"),
    ],
)
def test_unusable_keys_are_one_sentence_without_the_key(
    monkeypatch: pytest.MonkeyPatch, source: str, sentence: str
) -> None:
    monkeypatch.setenv("SHORT", FIRST.hex()[:-2])
    monkeypatch.setenv("WORDS", "sesame open")
    monkeypatch.setenv("TWICE", f"{FIRST.hex()}\n{FIRST.hex()}")
    with pytest.raises(ConfigError, match=sentence) as raised:
        read_keyring(source)
    assert FIRST.hex()[:8] not in str(raised.value)
    assert "sesame" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_pipe_as_key_file_is_refused_without_waiting_for_its_other_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys")
    with pytest.raises(ConfigError, match="give a regular file"):
        read_keyring(f"file:{tmp_path / 'keys'}")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o602])
def test_a_key_file_that_every_user_may_open_is_named_in_one_warning(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(FIRST.hex())
    keys.chmod(mode)
    link = tmp_path / "link"  # as Kubernetes mounts secrets
    link.symlink_to(keys)
    for _ in range(2):
        assert read_keyring(f"file:{link}") is not None
    warned = [message for message in caplog.messages if str(link) in message]
    assert len(warned) == (mode & 0o007 != 0)


def test_no_name_shows_a_key() -> None:
    ring = Keyring([FIRST, SECOND])
    shown = repr(ring) + repr(BlockCoder(8, keyring=ring))
    assert FIRST.hex()[:8] not in shown
    assert f"{key_id(FIRST):08x}" in shown
    assert os.environ["OUR_KEY"] not in shown


# -- the choice ------------------------------------------------------------------------------------


def test_auto_uses_the_codec_while_loads_gain_by_it() -> None:
    counts = CodecCounts(num_encoded=20, plain_bytes=20 << 20, stored_bytes=14 << 20)
    counts.decoded_bytes, counts.decode_s = 2_000_000_000, 1.0
    choice = CodecChoice(counts)
    assert choice.pays, "nothing was measured yet"
    choice.note_transfer(100_000_000, 1.0)
    assert choice.pays
    for _ in range(100):  # a link of 10 GB/s saves 0.03 ns a byte, and decoding takes 0.5
        choice.note_transfer(10_000_000_000, 1.0)
    assert not choice.pays
    assert 1 <= sum(choice.encodes_next() for _ in range(1000)) <= 5
    for _ in range(100):
        choice.note_transfer(100_000_000, 1.0)
    assert choice.pays, "the link has become slow again"


def test_auto_stores_as_it_is_what_never_shrinks() -> None:
    coder = make_coder(CodingConfig("auto"), opaque(BLOCK_BYTES))
    memory, into = memory_of("random"), np.zeros(BLOCK_BYTES + MAX_OVERHEAD, np.uint8)
    coder.choice.note_transfer(1, 1.0)
    for _ in range(200):
        assert coder.encode(KEYS[0], memory.pieces, into) is None
    assert coder.counts.num_kept < 30
