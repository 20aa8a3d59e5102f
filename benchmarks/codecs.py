"""Codecs and encryption of stored blocks: ratio, and speed per core.

    python -m benchmarks.codecs            a table
    python -m benchmarks.codecs --json -   JSON on stdout, the table on stderr

Contestants take turns; times are processor time of one thread. Besides the codec ``lossless``, zstd
and lz4 (if installed) compress the same bytes unchanged. Every block is decoded and compared before
it is timed.

The data are numbers like the KV of a trained model: normally distributed, with a scale per channel
whose logarithm is normally distributed with a deviation of 0.6, in the types that KV has. With
``--model`` there is the KV of a built-in model, whose weights are random, too.

With ``--links`` there is also the time to the first token of a prompt that comes from a store
behind a link of 1 and of 10 Gb/s, see ``benchmarks.codec_links``; ``--rounds 0`` measures nothing
else.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.codec_links import interval, measure_links
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report
from kvtier.core.types import BlockKey
from kvtier.tiers.codecs import BlockCoder
from kvtier.tiers.codecs.encryption import Keyring
from kvtier.tiers.codecs.frame import MAX_OVERHEAD
from kvtier.tiers.codecs.lossless import Lossless
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import Outcome

Uint8s = npt.NDArray[np.uint8]
BLOCK_BYTES = 2 << 20
NUM_CHANNELS = 1024
KEY = BlockKey(bytes(range(32)))


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant on one kind of data. Speeds are medians, in GB of plain bytes per second."""

    data: str
    contestant: str
    ratio: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    encode_spread: tuple[float, float]
    decode_spread: tuple[float, float]


def kv_like(deviation: float = 0.6) -> npt.NDArray[np.float32]:
    """Return float32 [n, NUM_CHANNELS]: one block's elements of the smallest type."""
    rng = np.random.default_rng(0)
    scales = np.exp(rng.normal(0, deviation, NUM_CHANNELS)).astype(np.float32)
    return rng.standard_normal((BLOCK_BYTES // NUM_CHANNELS, NUM_CHANNELS), np.float32) * scales


def data() -> dict[str, Uint8s]:
    """Return a block of each type."""
    import torch

    values = kv_like()
    tensor = torch.from_numpy(values)
    types = {
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float8 e4m3": torch.float8_e4m3fn,
        "float8 e5m2": torch.float8_e5m2,
        "float32": torch.float32,
    }
    made = {name: _bytes(tensor.to(kind).view(torch.uint8).numpy()) for name, kind in types.items()}
    made["random bytes"] = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES, np.uint8)
    return made


def _bytes(array: npt.NDArray[Any]) -> Uint8s:
    return np.ascontiguousarray(array).view(np.uint8).ravel()[:BLOCK_BYTES].copy()


def model_kv(model: str) -> Uint8s:
    """Return a block of the KV of a built-in model, as it lies on a disk."""
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from kvtier.core.config import CacheConfig
    from kvtier.serve.engine import Engine, EngineConfig

    with TemporaryDirectory() as folder:
        cache = CacheConfig(host_capacity="64MiB", disk_path=folder, disk_capacity="64MiB")
        with Engine(EngineConfig(model=model, dtype="bfloat16", cache=cache)) as engine:
            prompt = [7 + number * number % 501 for number in range(4000)]
            engine.submit(prompt).result(600)
            engine.drain()
        content = np.fromfile(Path(folder) / "data.slab", np.uint8)
    pages = content.reshape(-1, 4096)
    some = pages[pages.any(axis=1)].ravel()
    return np.resize(some, BLOCK_BYTES)


Way = tuple[Callable[[], int], Callable[[], bool]]
"""(encode, decode): encode returns the encoded size, decode whether it succeeded."""


def codec_ways(block: Uint8s) -> dict[str, Way]:
    """Return the contestants for one block."""
    import zstandard

    ways: dict[str, Way] = {}
    place = Pieces.whole([block.ctypes.data], len(block))
    again = np.empty_like(block)
    out = Pieces.whole([again.ctypes.data], len(block))
    ring = Keyring([os.urandom(32)])
    coders = {
        "lossless": BlockCoder(len(block), Lossless()),
        "AES-256-GCM": BlockCoder(len(block), keyring=ring),
        "lossless and AES-256-GCM": BlockCoder(len(block), Lossless(), keyring=ring),
    }

    def of_coder(coder: BlockCoder) -> Way:
        frame = np.empty(len(block) + MAX_OVERHEAD, np.uint8)

        def encode() -> int:
            head = coder.encode(KEY, place, frame)
            return len(block) if head is None else head.num_bytes

        def decode() -> bool:
            if coder.changes_blocks and coder.counts.num_encoded:
                return coder.decode(KEY, frame, out) is Outcome.THERE
            again[:] = block  # it was stored unchanged
            return True

        return encode, decode

    def of_functions(compress: Callable[[Any], bytes], decompress: Callable[[bytes], bytes]) -> Way:
        kept = [b""]

        def encode() -> int:
            kept[0] = compress(block.data)
            return len(kept[0])

        def decode() -> bool:
            again[:] = np.frombuffer(decompress(kept[0]), np.uint8)
            return True

        return encode, decode

    for name, coder in coders.items():
        ways[name] = of_coder(coder)
    for level in (1, 3):
        made = zstandard.ZstdCompressor(level=level)
        ways[f"zstd {level}"] = of_functions(made.compress, zstandard.ZstdDecompressor().decompress)
    with suppress(ImportError):
        lz4 = import_module("lz4.block")
        ways["lz4"] = of_functions(lz4.compress, lz4.decompress)
    for encode, decode in ways.values():
        encode()
        again[:] = 0
        assert decode()
        assert (again == block).all(), "it came back with other bytes"
    return ways


def measure(name: str, block: Uint8s, rounds: int) -> list[Row]:
    """Time all contestants on one block, in turn."""
    ways = codec_ways(block)
    took: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
    sizes = {}
    for turn in range(rounds + 1):
        for each, (encode, decode) in ways.items():
            began = time.thread_time()
            sizes[each] = encode()
            between = time.thread_time()
            decode()
            ended = time.thread_time()
            if turn:  # the first one warms up
                took[each][0].append(len(block) / (between - began) / 1e9)
                took[each][1].append(len(block) / (ended - between) / 1e9)
    return [
        Row(
            name,
            each,
            len(block) / sizes[each],
            statistics.median(there),
            statistics.median(back),
            (min(there), max(there)),
            (min(back), max(back)),
        )
        for each, (there, back) in took.items()
    ]


def main() -> None:
    parser = parser_of("codecs", __doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--model", action="append", default=[], help="a built-in model")
    parser.add_argument("--links", action="store_true", help="time to the first token, too")
    parser.add_argument("--link-rounds", type=int, default=10, help="prompts per link")
    given = parser.parse_args()
    blocks = data() | {f"{model}, bfloat16": model_kv(model) for model in given.model}
    some = blocks.items() if given.rounds else ()
    rows = [row for name, block in some for row in measure(name, block, given.rounds)]
    links = measure_links(given.link_rounds) if given.links else []
    table = Table("data", "contestant", "ratio", "encode GB/s", "decode GB/s")
    for row in rows:
        table.add_row(
            row.data,
            row.contestant,
            f"{row.ratio:.3f}",
            f"{row.encode_gb_per_s:.2f} ({row.encode_spread[0]:.2f} to {row.encode_spread[1]:.2f})",
            f"{row.decode_gb_per_s:.2f} ({row.decode_spread[0]:.2f} to {row.decode_spread[1]:.2f})",
        )
    for link in links:
        table.add_row(
            f"link of {link.gigabits_per_s} Gb/s",
            "seconds to the first token: as it is, lossless",
            interval(link.sooner),
            f"{link.plain_s:.3f}",
            f"{link.lossless_s:.3f}",
        )
    report(
        given.json,
        "codecs",
        machine_facts(),
        rows,
        [target for link in links if (target := link.target()) is not None],
        table,
        block_bytes=BLOCK_BYTES,
        rounds=given.rounds,
        links=[link.as_json() for link in links],
    )


if __name__ == "__main__":
    main()
