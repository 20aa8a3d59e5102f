"""The codecs ``fp8`` and ``int8``: conformance, ratios, codes, and lossy blocks in frames."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.core.config import CodingConfig
from kvtier.core.errors import ConfigError
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import DType
from kvtier.layout.group import full_attention, recurrent_state
from kvtier.node.config import NodeConfig
from kvtier.node.server.node import CacheNode
from kvtier.testing import LossyCodecSuite
from kvtier.testing.codec_suite import KINDS
from kvtier.testing.lossy_codec_suite import Float64s, channels_of
from kvtier.testing.storage_user import Scattered, cuts, stored_key
from kvtier.tiers import Outcome
from kvtier.tiers.codecs import Codec, make_coder
from kvtier.tiers.codecs.quantized import Fp8, Int8
from tests.kit.effort import effort

GROUP = full_attention(2, 2, 16, DType.BFLOAT16, 32)
KEY = stored_key(1)
NUM_CHANGED = effort(100_000)


def scales_of(values: Float64s, largest_code: float) -> Float64s:
    """Return the most that a scale can be: rounding up to bfloat16 adds less than 2^-7."""
    return np.abs(values).max(axis=0) / largest_code * (1 + 2**-7) + 2.0**-133


class TestFp8(LossyCodecSuite):
    num_damaged = effort(20_000)

    def make_codec(self) -> Codec:
        return Fp8()

    def most_error(self, values: Float64s) -> Float64s:
        return np.maximum(np.abs(values) / 16, scales_of(values, 448) / 1024)


class TestInt8(LossyCodecSuite):
    num_damaged = effort(20_000)

    def make_codec(self) -> Codec:
        return Int8()

    def most_error(self, values: Float64s) -> Float64s:
        return np.broadcast_to(scales_of(values, 127) / 2, values.shape)


@pytest.mark.parametrize("codec", [Fp8, Int8])
@pytest.mark.parametrize(
    ("dtype", "ratio"), [("bfloat16", 1.94), ("float16", 1.94), ("float32", 3.88)]
)
def test_blocks_of_64_tokens_shrink(codec: type[Fp8 | Int8], dtype: str, ratio: float) -> None:
    group = full_attention(2, 2, 16, DType(dtype), 64)
    block = np.resize(KINDS[dtype], group.bytes_per_block)
    num = codec(group).encode(block, np.empty_like(block))
    assert num is not None
    assert len(block) / num == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize("codec", [Fp8, Int8])
def test_channel_has_a_scale_of_its_own(codec: type[Fp8 | Int8]) -> None:
    """Outliers of one channel, in K of one layer, change no other channel."""
    plain = np.resize(KINDS["bfloat16"], GROUP.bytes_per_block)
    loud = plain.copy()
    loud.view(np.uint16).reshape(2, 2, 32, 32)[1, 0, 5, 7] = 0x4700  # 32768
    decoded = []
    for block in (plain, loud):
        into, again = np.empty_like(block), np.empty_like(block)
        num = codec(GROUP).encode(block, into)
        assert num is not None
        assert codec(GROUP).decode(into[:num], again)
        decoded.append(np.stack(list(channels_of(again, GROUP))))
    changed = (decoded[0] != decoded[1]).any(axis=1)
    assert {tuple(each) for each in np.argwhere(changed)} == {(2, 7)}


def test_states_and_other_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="state per block"):
        Int8(recurrent_state(1, (("conv", 4, 4),), DType.BFLOAT16, 16))
    with pytest.raises(ConfigError, match="float8"):
        Fp8(full_attention(1, 1, 8, DType.FLOAT8, 16))


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_whoever_knows_no_shape_refuses_at_the_start(codec: str, tmp_path: Path) -> None:
    store = "valkey://127.0.0.1:1"
    with pytest.raises(ConfigError, match=f"{codec} needs to know the layers"):
        VllmSettings(storage=store, codec=codec)
    with pytest.raises(ConfigError, match=f"{codec} needs to know the layers"):
        CacheNode(NodeConfig(socket=tmp_path, storage=(store,), codec=codec), CpuDevice())


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_frame_is_read_by_its_own_codec_only(name: str) -> None:
    coder = make_coder(CodingConfig(name), GROUP)
    memory = Scattered(1, cuts(GROUP.bytes_per_block)["unequal pieces"])
    memory.write(0, KINDS["bfloat16"][: GROUP.bytes_per_block].tobytes())
    into = np.zeros(coder.most_bytes, np.uint8)
    head = coder.encode(KEY, memory.pieces, into)
    assert head is not None
    assert coder.can_read(head.codec, 0)
    assert coder.decode(KEY, into[: head.num_bytes], memory.pieces) is Outcome.THERE
    first = memory.read(0)
    other = "int8" if name == "fp8" else "fp8"
    for exact in ("none", other):
        reader = make_coder(CodingConfig(exact), GROUP)
        assert not reader.can_read(head.codec, 0)
        assert reader.decode(KEY, into[: head.num_bytes], memory.pieces) is Outcome.ABSENT
        assert memory.read(0) == first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_nothing_changed_becomes_a_wrong_byte(name: str) -> None:
    """Flipped and truncated frames: the checksum is that of the decoded block."""
    coder, rng = make_coder(CodingConfig(name), GROUP), random.Random(3)
    memory = Scattered(1, cuts(GROUP.bytes_per_block)["unequal pieces"])
    memory.write(0, KINDS["bfloat16"][: GROUP.bytes_per_block].tobytes())
    into = np.zeros(coder.most_bytes, np.uint8)
    head = coder.encode(KEY, memory.pieces, into)
    assert head is not None
    frame = into[: head.num_bytes]
    assert coder.decode(KEY, frame, memory.pieces) is Outcome.THERE
    right = memory.read(0)
    num_right = 0
    for turn in range(NUM_CHANGED):
        changed = frame.copy()
        changed[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        if turn % 3 == 0:
            changed = changed[: rng.randrange(len(frame))].copy()
        if coder.decode(KEY, changed, memory.pieces) is Outcome.THERE:
            assert memory.read(0) == right
            num_right += 1
    assert num_right <= NUM_CHANGED // 100, "a code of a channel of zeros, at most"
