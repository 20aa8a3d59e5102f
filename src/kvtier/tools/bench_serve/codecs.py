"""``kvtier bench codec``: what codecs save, what they cost, and what lossy ones do to answers.

A prompt is computed once with exact KV. Then the KV of its beginning is encoded and decoded by each
codec, as if it had been loaded from a store, and the rest is computed again after it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import thread_time

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from kvtier.core.errors import ConfigError
from kvtier.core.system.plugins import known_plugins
from kvtier.layout import KVGroup
from kvtier.serve.engine.models import LoadedModel
from kvtier.serve.engine.prompt_bench import Float32s, PromptBench, load_for_bench
from kvtier.tiers.codecs.codec import Codec, Uint8s
from kvtier.tiers.codecs.opening import make_codec
from kvtier.tools.bench_serve.options import CodecOptions
from kvtier.tools.report.corpus import Corpus
from kvtier.tools.report.machine import Fact, machine_facts
from kvtier.tools.report.progress import Progress

NUM_PROMPTS, PROMPT_TOKENS = 4, 512
"""Prompts of the benchmark's own, from the interpreter's library."""
LOADED_SHARE = 0.75
"""Part of a prompt whose KV is loaded; rounded down to blocks."""
MAX_COMPUTED = 256
"""Most tokens, about, that are computed after it: their logits are kept."""

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CodecRow:
    """Measurement of one codec.

    ratio: plain bytes per stored byte, without headers.
    encode_gb_per_s, decode_gb_per_s: plain bytes per second of one core's time, without checksums.
    keeps_bits: whether all KV came back bit for bit.
    kl_mean, kl_p99, kl_max: Kullback-Leibler divergence of the next token's distribution from that
        with exact KV, in nats, over the positions after the loaded prefix.
    num_changed: prompts whose greedy answer is another one.
    """

    codec: str
    ratio: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    keeps_bits: bool
    kl_mean: float
    kl_p99: float
    kl_max: float
    num_changed: int
    changed_share: float


@dataclass(frozen=True, slots=True)
class CodecResult:
    """Result on one model. num_skipped: prompts too short. left_out: codecs that can't be used."""

    model: str
    dtype: str
    source: str
    machine: dict[str, Fact]
    num_prompts: int
    num_skipped: int
    num_positions: int
    loaded_tokens: int
    block_bytes: int
    answer_tokens: int
    rows: tuple[CodecRow, ...]
    left_out: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Return the result as one object, as every benchmark prints it."""
        found = asdict(self)
        return {"benchmark": "codecs", "machine": found.pop("machine"), **found}


@dataclass(slots=True)
class _Sums:
    """Measurements of one codec, over all prompts until now."""

    plain_bytes: int = 0
    stored_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    keeps_bits: bool = True
    divergences: list[Float64s] = field(default_factory=list)
    num_changed: int = 0

    def row(self, name: str, num_prompts: int) -> CodecRow:
        found = np.concatenate(self.divergences)
        return CodecRow(
            codec=name,
            ratio=self.plain_bytes / self.stored_bytes,
            encode_gb_per_s=self.plain_bytes / max(self.encode_s, 1e-9) / 1e9,
            decode_gb_per_s=self.plain_bytes / max(self.decode_s, 1e-9) / 1e9,
            keeps_bits=self.keeps_bits,
            kl_mean=float(found.mean()),
            kl_p99=float(np.percentile(found, 99)),
            kl_max=float(found.max()),
            num_changed=self.num_changed,
            changed_share=self.num_changed / num_prompts,
        )


def measure_codecs(options: CodecOptions, progress: Progress) -> CodecResult:
    """Measure every installed codec on a model's own KV.

    Raises:
        ConfigError: the model or the prompts can't be used.
    """
    if options.answer_tokens < 1 or options.block_size < 1:
        raise ConfigError("answer_tokens and block_size are 1 at least")
    model = load_for_bench(options.model, options.device, options.dtype)
    group = model.profile.group(options.block_size)
    codecs, left_out = _codecs(group)
    prompts, num_skipped, source = _prompts(model, options)
    longest = max(map(len, prompts)) + options.answer_tokens
    bench = PromptBench(model, group, longest)
    sums = {name: _Sums() for name in codecs}
    progress.begin("prompts", len(prompts))
    num_positions = loaded_tokens = 0
    for prompt in prompts:
        loaded = _loaded_tokens(len(prompt), options.block_size)
        bench.compute(prompt, 0, loaded)
        blocks = bench.read(loaded)
        logits = bench.compute(prompt, loaded, len(prompt))
        answer = bench.answer(logits[-1], len(prompt), options.answer_tokens)
        num_positions += len(logits)
        loaded_tokens += loaded
        for name, codec in codecs.items():
            decoded = _round_trip(codec, blocks, sums[name])
            if (decoded == blocks).all():  # equal bits give equal logits
                sums[name].divergences.append(np.zeros(len(logits)))
                continue
            sums[name].keeps_bits = False
            bench.write(decoded)
            again = bench.compute(prompt, loaded, len(prompt))
            sums[name].divergences.append(divergence(logits, again))
            other = bench.answer(again[-1], len(prompt), options.answer_tokens)
            sums[name].num_changed += other != answer
        progress.advance()
    return CodecResult(
        model=model.name,
        dtype=group.dtype.value,
        source=source,
        machine=machine_facts(),
        num_prompts=len(prompts),
        num_skipped=num_skipped,
        num_positions=num_positions,
        loaded_tokens=loaded_tokens,
        block_bytes=group.bytes_per_block,
        answer_tokens=options.answer_tokens,
        rows=tuple(each.row(name, len(prompts)) for name, each in sums.items()),
        left_out=tuple(left_out),
    )


def divergence(exact: Float32s, other: Float32s) -> Float64s:
    """Return the Kullback-Leibler divergence of ``other`` from ``exact``, in nats, per position.

    exact, other: logits, float32 [num_positions, vocab_size].
    Returns float64 [num_positions], 0 at least.
    """
    expected = _log_softmax(exact)
    found = (np.exp(expected) * (expected - _log_softmax(other))).sum(axis=-1)
    return np.asarray(np.maximum(found, 0))


def _log_softmax(logits: Float32s) -> Float64s:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: one per line, or in a ``.jsonl`` file the field ``prompt``.

    Empty lines are left out. Raises ``ConfigError``.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"prompts: {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"prompts: {path} is no text; write one prompt per line") from None
    found = [line for line in lines if line.strip()]
    if path.suffix == ".jsonl":
        found = [_prompt_of(line, path) for line in found]
    if not found:
        raise ConfigError(f"prompts: {path} has no prompt; write one per line")
    return found


def _prompt_of(line: str, path: Path) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise ConfigError(f'prompts: {path} has a line that is not {{"prompt": "..."}}')
    return prompt


def _prompts(model: LoadedModel, options: CodecOptions) -> tuple[list[list[int]], int, str]:
    """Return the tokens of the prompts, the number of those too short, and where they are from."""
    most, least = model.max_tokens - options.answer_tokens, options.block_size + 1
    if most < least:
        raise ConfigError(
            f"answer_tokens: {options.answer_tokens} leave no room for a prompt of {least} tokens "
            f"in {model.max_tokens}; give fewer, or a smaller block_size"
        )
    encode = model.tokenizer.encode
    if options.prompts is None:
        corpus = Corpus(encode)
        num_tokens = min(most, max(PROMPT_TOKENS, least))
        made = corpus.prompts(NUM_PROMPTS, num_tokens, options.block_size)
        return [list(each) for each in made], 0, corpus.source
    found = [encode(text, special_tokens=True)[:most] for text in read_prompts(options.prompts)]
    long = [each for each in found if len(each) >= least]
    if not long:
        raise ConfigError(
            f"prompts: none of the {len(found)} prompts has more than a block of "
            f"{options.block_size} tokens; give longer ones, or a smaller block_size"
        )
    return long, len(found) - len(long), str(options.prompts)


def _loaded_tokens(num_tokens: int, block_size: int) -> int:
    """Return how many tokens of a prompt are loaded: whole blocks, at least one, never all."""
    wanted = max(int(num_tokens * LOADED_SHARE), num_tokens - MAX_COMPUTED)
    return max(block_size, min(wanted, num_tokens - 1) // block_size * block_size)


def _codecs(group: KVGroup) -> tuple[dict[str, Codec], list[str]]:
    """Return the codecs that encode this KV, exact ones first, and why others can't."""
    found: dict[str, Codec] = {}
    left_out = []
    for name in sorted(known_plugins("codecs")):
        try:
            found[name] = make_codec(name).fit(group)
        except ConfigError as error:
            left_out.append(f"{name}: {str(error).removeprefix('codec: ')}")
    return dict(sorted(found.items(), key=lambda each: each[1].is_lossy)), left_out


def _round_trip(codec: Codec, blocks: Uint8s, sums: _Sums) -> Uint8s:
    """Return blocks as a store gives them back. A block that does not shrink is stored as it is.

    blocks: uint8 [num_blocks, block_bytes].
    """
    into, again = np.empty(blocks.shape[1], np.uint8), np.empty_like(blocks)
    if not sums.plain_bytes:  # the first call allocates memory
        codec.encode(blocks[0], into)
    for block, decoded in zip(blocks, again, strict=True):
        began = thread_time()
        num = codec.encode(block, into)
        sums.encode_s += thread_time() - began
        sums.plain_bytes += len(block)
        sums.stored_bytes += len(block) if num is None else num
        if num is None:
            decoded[:] = block
            continue
        began = thread_time()
        is_decoded = codec.decode(into[:num], decoded)
        sums.decode_s += thread_time() - began
        assert is_decoded, "a codec decodes what it has encoded"
    return again


def show_codecs(console: Console, result: CodecResult) -> None:
    """Print a table with a line per codec."""
    table = Table(
        title=f"{result.model}, {result.dtype}: {result.num_prompts} prompts of {result.source}; "
        f"{result.loaded_tokens:,} tokens loaded, {result.num_positions:,} computed after them",
        title_justify="left",
        box=None,
    )
    for heading in ("codec", "ratio", "encode", "decode", "exact", "KL mean", "KL p99", "KL max",
                    "changed"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "codec" else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(
            row.codec,
            f"{row.ratio:.2f}",
            f"{row.encode_gb_per_s:.2f}",
            f"{row.decode_gb_per_s:.2f}",
            "yes" if row.keeps_bits else "no",
            *(f"{value:.1e}" if value else "0" for value in (row.kl_mean, row.kl_p99, row.kl_max)),
            f"{row.num_changed} of {result.num_prompts}",
        )
    console.print(table)
    console.print(
        "encode, decode: GB/s per core. KL: of the next token's distribution, in nats. changed: "
        f"greedy answers of {result.answer_tokens} tokens.",
        highlight=False,
    )
    if result.num_skipped:
        console.print(
            f"skipped: {result.num_skipped} prompts shorter than a block", highlight=False
        )
    for line in result.left_out:
        console.print(f"left out: {line}", highlight=False, soft_wrap=True)
