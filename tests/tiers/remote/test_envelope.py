"""Headers of blocks, and URLs of stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.errors import ConfigError
from kvtier.core.types import BlockKey
from kvtier.tiers import Pieces
from kvtier.tiers.crc_join import block_crcs
from kvtier.tiers.remote import envelope
from kvtier.tiers.remote.envelope import HEADER_BYTES, Envelope
from kvtier.tiers.remote.location import StoreOptions, read_location, read_options
from kvtier.tiers.storage import Outcome

BLOCK_BYTES = 96
NUM = 4
KEYS = [BlockKey(bytes([number]) * 32) for number in range(NUM)]


def blocks() -> tuple[np.ndarray, Pieces]:
    memory = np.random.default_rng(1).integers(0, 256, NUM * BLOCK_BYTES, dtype=np.uint8)
    begins = memory.ctypes.data + np.arange(NUM) * BLOCK_BYTES
    sizes = np.array([64, BLOCK_BYTES - 64])
    return memory, Pieces(np.stack([begins, begins + 64], 1).astype(np.uint64), sizes)


@pytest.mark.parametrize("secret", [b"", b"ours"])
@given(
    flips=st.lists(st.tuples(st.integers(0, NUM - 1), st.integers(0, 8 * HEADER_BYTES - 1))),
    cut=st.integers(0, HEADER_BYTES),
)
def test_changed_header_is_none_of_its_key(
    secret: bytes, flips: list[tuple[int, int]], cut: int
) -> None:
    memory, pieces = blocks()
    made = Envelope(BLOCK_BYTES, secret)
    headers = [bytearray(header) for header in made.headers(KEYS, pieces, block_crcs(pieces))]
    for at, bit in flips:
        headers[at][bit // 8] ^= 1 << bit % 8
    given_headers: list[bytes | None] = [bytes(header) for header in headers]
    given_headers += [None, given_headers[0][:cut] if given_headers[0] else None]
    keys = [*KEYS, KEYS[0], KEYS[0]]
    originals = made.headers(KEYS, pieces, block_crcs(pieces))
    are_whole = [text == original for text, original in zip(headers, originals, strict=True)]
    is_uncut = cut == HEADER_BYTES and are_whole[0]
    assert made.are_of(given_headers, keys) == [*are_whole, False, is_uncut]
    assert memory.any()


def test_block_of_another_size_is_none() -> None:
    _, pieces = blocks()
    header = Envelope(BLOCK_BYTES).headers(KEYS, pieces, block_crcs(pieces))[0]
    assert Envelope(BLOCK_BYTES + 1).are_of([header], KEYS[:1]) == [False]


def test_blocks_of_another_secret_found_by_two_threads_are_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, pieces = blocks()
    headers = Envelope(BLOCK_BYTES, b"theirs").headers(KEYS, pieces, block_crcs(pieces))
    ours, said = Envelope(BLOCK_BYTES, b"ours"), []

    def decode(at: int) -> Outcome:
        stored = memory[at * BLOCK_BYTES :][:BLOCK_BYTES]
        return ours.decode(headers[at], KEYS[at], stored, pieces.pick([at]))

    def warning(message: str) -> None:  # the second block arrives while the first is reported
        said.append(message)
        assert decode(1) is Outcome.DAMAGED

    monkeypatch.setattr(envelope.logger, "warning", warning)
    assert decode(0) is Outcome.DAMAGED
    assert len(said) == 1
    assert [ours.is_others(key) for key in KEYS] == [True, True, False, False]


def test_secret_is_in_no_name(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("sesame\n")
    location = read_location("s", f"//me:sesame@host:1/place?secret_file={tmp_path / 'secret'}")
    options = read_options(StoreOptions, location)
    assert options.secret() == b"sesame"
    shown = [str(location), repr(location), repr(options), repr(Envelope(1, options.secret()))]
    assert not any("sesame" in each for each in shown)
    assert str(location) == "s://host:1/place"


@pytest.mark.parametrize("text", ["", "\n"])
def test_empty_secret_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "secret").write_text(text)
    location = read_location("s", f"//host?secret_file={tmp_path / 'secret'}")
    with pytest.raises(ConfigError, match="is empty"):
        read_options(StoreOptions, location).secret()
