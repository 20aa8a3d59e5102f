"""Blocks of any layout between a device pool and a slab: the same bytes as ``repack`` brings."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.devices.base import Memory
from kvtier.layout import (
    DType,
    KVGroup,
    Layout,
    fragments,
    full_attention,
    latent_attention,
    named_layout,
    repack,
)
from kvtier.tiers.disk.arrays import Int64s, Uint64s
from tests.devices.drivers import make_device
from tests.kit.fakes.storage import StorageFake
from tests.tiers.disk.direct_harness import PAGE, WAYS, open_direct

GROUPS = {
    "4 KiB a layer and part": full_attention(5, 2, 64, DType.FLOAT16, 16),
    "12 KiB": full_attention(3, 3, 128, DType.FLOAT16, 16),
    "MLA, 32 and 4 KiB": latent_attention(4, 512, 64, DType.BFLOAT16, 32),
}
ORDERS = ["layer_first", "part_first", "block_first", "page_first_direct"]
"""Layouts whose pieces are whole pages."""


def _batch(
    layout: Layout, blocks: Int64s, file: Layout, slots: Int64s, address: int
) -> tuple[Int64s, Uint64s, Int64s]:
    pieces = fragments(layout, file)
    addresses = pieces.src(blocks).ravel().astype(np.uint64) + np.uint64(address)
    return pieces.dst(slots).ravel(), addresses, np.tile(pieces.size, len(blocks))


@pytest.mark.parametrize("name", WAYS)
@given(
    group=st.sampled_from(list(GROUPS.values())),
    orders=st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS)),
    num_blocks=st.integers(1, 6),
    percent_short=st.sampled_from([0, 40]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_pool_goes_to_a_slab_and_back_as_repack_would_bring_it(
    name: str,
    group: KVGroup,
    orders: tuple[str, str],
    num_blocks: int,
    percent_short: int,
    seed: int,
) -> None:
    fake_name, way = WAYS[name]
    fake, random = StorageFake(fake_name), np.random.default_rng(seed)
    fake.reset_storage(seed, 0, percent_short)
    device = make_device(fake)
    there, back = (named_layout(order, group, num_blocks + 2) for order in orders)
    file = named_layout("block_first", group, num_blocks + 3)
    address = fake.allocate(there.nbytes + back.nbytes)
    content = random.integers(0, 256, there.nbytes, np.uint8)
    before = random.integers(0, 256, back.nbytes, np.uint8)
    fake.poke(address, np.concatenate([content, before]))
    blocks = random.permutation(there.num_blocks)[:num_blocks]
    slots = random.permutation(file.num_blocks)[:num_blocks]
    to = random.permutation(back.num_blocks)[:num_blocks]
    with tempfile.TemporaryFile() as slab:
        slab.write(bytes(file.nbytes))
        slab.flush()
        fd = os.open(f"/proc/self/fd/{slab.fileno()}", os.O_RDWR | os.O_DIRECT)
        whole = Memory(address, there.nbytes + back.nbytes, "fake", None)
        engine = open_direct(fake, device, fd, [whole], way)
        offsets, addresses, sizes = _batch(there, blocks, file, slots, address)
        shuffle = random.permutation(len(sizes))
        offsets, addresses, sizes = offsets[shuffle], addresses[shuffle], sizes[shuffle]
        assert (sizes % PAGE == 0).all()
        assert engine.write(offsets, addresses, sizes).tolist() == sizes.tolist()
        expected = np.zeros(file.nbytes, np.uint8)
        repack(content, there, blocks.tolist(), expected, file, slots.tolist())
        slab.seek(0)
        assert np.array_equal(np.frombuffer(slab.read(), np.uint8), expected)

        batch = _batch(back, to, file, slots, address + there.nbytes)
        assert engine.read(*batch, 60.0).tolist() == batch[2].tolist()
        repack(expected, file, slots.tolist(), before, back, to.tolist())
        assert np.array_equal(fake.peek(address + there.nbytes, back.nbytes), before)
        assert np.array_equal(fake.peek(address, there.nbytes), content), "what was stored"
        engine.close()
        os.close(fd)
    device.close()
    fake.free(address)
    assert fake.violations == []
    assert fake.storage_leaks == []
    assert fake.leaks == []
