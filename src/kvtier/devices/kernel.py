"""Small copies by a kernel: the GPU itself reads and writes page-locked host memory.

Below some 32 KiB the fixed cost of a copy exceeds that of its bytes on a GPU's copy engine.
Instead, a few programs, each on its own multiprocessor, do one copy after another; they are few, so
that the other multiprocessors can compute. Needs Triton, and host memory that the GPU sees at the
host's address.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kvtier.devices.base import Direction
from kvtier.devices.compute import Handle
from kvtier.devices.copies import Copies

MAX_PROGRAMS = 16
"""Maximum number of multiprocessors used."""
WORDS = 1024
"""Words of 8 bytes that a program moves at a time."""
NUM_WARPS = 4
ALIGNMENT = 16
"""Alignment of addresses and sizes, so that each thread moves 16 bytes at once."""


@triton.jit
def copy_words(dst_of, src_of, num_words_of, num_copies, words: tl.constexpr):
    """Copy ``num_words_of[i]`` words of 8 bytes from address ``src_of[i]`` to ``dst_of[i]``.

    Program p of P does copies p, p + P, p + 2 P, and so on.
    """
    for at in range(tl.program_id(0), num_copies, tl.num_programs(0)):
        dst = tl.multiple_of(tl.load(dst_of + at), 16).to(tl.pointer_type(tl.int64))
        src = tl.multiple_of(tl.load(src_of + at), 16).to(tl.pointer_type(tl.int64))
        num_words = tl.load(num_words_of + at)
        for first in range(0, num_words, words):
            word = first + tl.arange(0, words)
            inside = word < num_words
            tl.store(dst + word, tl.load(src + word, mask=inside), mask=inside)


def launch(table: torch.Tensor) -> None:
    """Launch the copies of a table on the current stream.

    table: int64 [3, num_copies] = dst, src, words; in device memory.
    """
    num_copies = table.shape[1]
    grid = (min(MAX_PROGRAMS, num_copies),)
    copy_words[grid](*table.unbind(), num_copies, words=WORDS, num_warps=NUM_WARPS)


class TritonKernel:
    """Copies on one GPU of torch."""

    def __init__(self, name: str) -> None:
        self._device = torch.device(name)

    def takes(self, copies: Copies) -> bool:
        """Whether all addresses and sizes are aligned."""
        bits = np.bitwise_or.reduce(copies.dst | copies.src | copies.size)
        return not int(bits) % ALIGNMENT

    def copy(self, copies: Copies, direction: Direction, stream: Handle) -> object:
        """Queue the copies on ``stream``. Both directions use the same kernel."""
        del direction
        words = np.stack([copies.dst, copies.src, copies.size >> np.uint64(3)]).view(np.int64)
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self._device)),
        ):
            host = torch.from_numpy(words).pin_memory()
            table = host.to(self._device, non_blocking=True)
            launch(table)
        return host, table
