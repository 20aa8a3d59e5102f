"""The kernel's program over CPU memory, in Triton's interpreter. Prints how many copies it did."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np
import torch

from kvtier.devices.kernel import ALIGNMENT, launch


def main() -> None:
    rng = np.random.default_rng(7)
    sizes = rng.integers(1, 1500, 40) * ALIGNMENT  # below, at and above one step of a program
    order = rng.permutation(len(sizes))  # the pieces lie in another order in the destination
    src_begin, dst_begin = np.cumsum(sizes) - sizes, np.empty_like(sizes)
    dst_begin[order] = np.cumsum(sizes[order] + ALIGNMENT) - sizes[order]
    src, dst = (_aligned(int(sizes.sum()) + (len(sizes) + 1) * ALIGNMENT) for _ in range(2))
    src[:] = torch.from_numpy(rng.integers(0, 256, len(src), np.uint8))
    expected = torch.zeros_like(dst)
    for at, to, size in zip(src_begin.tolist(), dst_begin.tolist(), sizes.tolist(), strict=True):
        expected[to : to + size] = src[at : at + size]
    table = np.stack([dst_begin + dst.data_ptr(), src_begin + src.data_ptr(), sizes // 8])
    launch(torch.from_numpy(table.astype(np.int64)))
    assert torch.equal(dst, expected), "wrong bytes"
    print(len(sizes))


def _aligned(size: int) -> torch.Tensor:
    memory = torch.zeros(size + ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT :][:size]


if __name__ == "__main__":
    main()
