"""The model card, filled with the numbers of the run that made the weights."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import schedule
from .judge import NEW_TOKENS

CARD = """\
---
language: [en, code]
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# kvtier-tiny

A language model of {parameters:,} parameters that ships with kvtier, so that its engine, its server
and its benchmarks run at once, offline, on a laptop CPU, and print text instead of noise.

## What it is for
- trying `kvtier serve`, and testing and measuring KV caching with trained weights, whose output
  depends on the prompt. Left to decode greedily, it ends in a loop now and then (see below), so to
  show that a cache is right, compare logits: equal tokens prove little;
- prompts of up to 4,096 tokens (the length that it was trained and judged at). The configuration
  allows 8,192; quality beyond 4,096 was not looked at.

## What it is not for
Answers that anybody relies on. It has read one small corpus and little of it has stuck: it makes up
functions, arguments and explanations. It is no coding assistant, knows no language but the English
of the library's comments, and was not tuned for safety. Its text says nothing about the quality of
larger models.

## Shape
Qwen3 (`Qwen3ForCausalLM`): {layers} layers, hidden size {hidden}, {heads} query heads and
{kv_heads} key-value heads of {head_dim}, feed-forward {intermediate}, tied embeddings, rotary base
10,000. Weights in bf16. KV cache: {kv_bytes:,} bytes per token in bf16. The tokenizer is a
byte-level BPE of {vocab:,} tokens learned from the same corpus, with `<|endoftext|>`,
`<|im_start|>`, `<|im_end|>` and a chat template; both `<|im_end|>` and `<|endoftext|>` end a text.

## Data and licence
The Python sources of the standard library of CPython {python}, as installed beside the interpreter
that ran the training: {files} files, without tests, third-party packages and character tables, and
the language reference that ships with `pydoc`; {corpus_tokens:,} tokens. They are licensed under
the Python Software Foundation License version 2, copyright Python Software Foundation; some modules
carry further notices of their authors. The weights are licensed under the Apache License 2.0, like
kvtier. About 15 % of what was trained on are chat samples made from the same sources by
`scripts/tiny/chat.py` (question: a function's name; answer: the first paragraph of its docstring,
its signature or its code), with a handful of sentences about kvtier. Nothing was downloaded. A
model this small can repeat passages of its corpus.

Held out, and used for the numbers below: {held_out_files} files, among them `doctest`,
`http.cookiejar`, `statistics` and `xml.dom.minidom`.

## Training
{training}

## Measured
On {held_out_tokens:,} held-out tokens, rows of 1,024: loss {loss:.3f} nats per token, perplexity
{perplexity:.2f}, {bits_per_byte:.3f} bits per byte.

Loss by position, {long_rows} held-out rows of 4,096 tokens. The last column judges the same tokens
with only the nearest 512 to 1,023 tokens as context. Far context {far_changes} the loss by
{far_gain:.3f} on average.

| positions | loss | with near context only |
|---|---|---|
{positions}

Greedy decoding, {new_tokens} tokens after each of {prompts} held-out prompts of 3,500 tokens:
distinct tokens per output {d_min} at least, {d_median} in the median, {d_max} at most;
{distinct_all} distinct tokens over all outputs. {looping} of {prompts} outputs end in a loop (their
second half repeats one passage of up to 15 tokens).

### Three of them
{samples}
### Chat
{chats}"""

ONE_RUN = """\
{train_tokens:,} tokens ({epochs:.2f} times the corpus) in {done:,} steps of 4,096: {phase_0:,}
steps with rows of 512 tokens, then {phase_1:,} with rows of 2,048 and {phase_2:,} with rows of
4,096 while the learning rate fell to {last_rate:.0%} of its peak; {wall_minutes:.0f} minutes,
stopped by the clock {left} steps before the schedule's end. The result was a moving average of the
weights, with a held-out loss of {valid_averaged:.2f} on a quarter of the rows measured below."""

MORE_RUN = """\
{train_tokens:,} tokens ({epochs:.2f} times the corpus) in {done:,} steps of 4,096, with fresh
optimiser state and the rows in another order: {phase_0:,} steps with rows of 512 tokens,
{phase_1:,} with rows of 2,048 and {phase_2:,} with rows of 4,096. The learning rate rose to
{peak:.0%} of the first run's peak within {warmup} steps, then fell linearly to zero at the end;
{wall_minutes:.0f} minutes. The held-out loss on the same quarter of the rows went from
{valid_before:.2f} to {valid_kept:.2f}. What was kept is {kept}."""

ONE_COMMAND = """\
    nice -n 15 python scripts/train_tiny.py --log train.jsonl
    python scripts/train_tiny.py --judge --log train.jsonl"""

FIRST_COMMAND = "    nice -n 15 python scripts/train_tiny.py --out run1 --log run1.jsonl"

MORE_COMMAND = """\
    nice -n 19 python scripts/train_tiny.py --continue-from run{before} --minutes {budget:g} \\
        --out run{number} --log run{number}.jsonl"""

JUDGE_COMMAND = """\
    python scripts/train_tiny.py --judge --prompts {prompts} --out run{last} \\
        {logs}"""


def _run_fields(log: dict[str, Any]) -> dict[str, Any]:
    first, *rest = log["phases"]
    return {
        **log,
        "epochs": log["train_tokens"] / log["corpus_tokens"],
        "phase_0": first,
        "phase_1": rest[0],
        "phase_2": log["done"] - first - rest[0],
        "left": first + sum(rest) - log["done"],
        "last_rate": 1 - (log["done"] - first) / sum(rest),
        "wall_minutes": log["s"] / 60,
        "peak": schedule.CONTINUED_PEAK,
        "warmup": schedule.CONTINUED_WARMUP_STEPS,
    }


def _training(runs: list[dict[str, Any]], prompts: int) -> str:
    """Return the description of all runs, and the commands."""
    ways = "Muon for the matrices inside the layers, AdamW for the rest; fp32, on two CPU cores.\n"
    versions = f"(torch {version('torch')}, transformers {version('transformers')})"
    first, *more = runs
    if not more:
        text = ways + ONE_RUN.format(**_run_fields(first))
        commands, again = [ONE_COMMAND], "Seeds are fixed."
    else:
        total = sum(run["train_tokens"] for run in runs)
        texts = [ONE_RUN.format(**_run_fields(first)), *map(_more, more)]
        numbered = (f"{number}. {_indented(text)}\n" for number, text in enumerate(texts, 1))
        times = total / first["corpus_tokens"]
        text = (
            f"{ways}{len(runs)} runs, {total:,} tokens in all, {times:.2f} times the corpus.\n\n"
            f"{''.join(numbered)}"
        ).rstrip()
        commands = [FIRST_COMMAND]
        for number, run in enumerate(more, 2):
            commands.append(
                MORE_COMMAND.format(before=number - 1, number=number, budget=run["budget_minutes"])
            )
        logs = " ".join(f"--log run{number}.jsonl" for number in range(1, len(runs) + 1))
        commands.append(JUDGE_COMMAND.format(prompts=prompts, last=len(runs), logs=logs))
        again = (
            "Seeds are fixed, but the schedule of every run after the first follows the clock, so\n"
            "that the number of its steps depends on the machine."
        )
    return (
        f"{text}\n\nIt is still under-trained for its size: more steps would help. To do it again\n"
        f"{versions}:\n\n" + "\n".join(commands) + f"\n\n{again} Another interpreter, package "
        "release, number of\nthreads or kind of CPU gives different weights, too."
    )


def _more(log: dict[str, Any]) -> str:
    """Return the description of a continued run."""
    plain = log["valid"] <= log["valid_averaged"]
    return MORE_RUN.format(
        **_run_fields(log),
        valid_kept=log["valid"] if plain else log["valid_averaged"],
        kept="the last step" if plain else "a moving average of the weights",
    )


def _indented(text: str) -> str:
    return text.replace("\n", "\n   ")


def read_log(path: Path) -> dict[str, Any]:
    """Return the last value of every field of a training log."""
    fields: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        fields.update(json.loads(line))
    if "done" not in fields:
        raise ValueError(f"{path} is the log of a run that did not end. Let it end first.")
    return fields


def _fenced(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def write_card(folder: Path, runs: list[dict[str, Any]], verdict: dict[str, Any]) -> None:
    """Write ``README.md`` from the logs of all runs, in order, and the result of ``judge``."""
    log = runs[-1]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rows = [
        f"| {row['positions']} | {row['loss']:.3f} | {row['loss_near_context'] or '-'} |"
        for row in verdict["by_position"]
    ]
    gains = [r["loss_near_context"] - r["loss"] for r in verdict["by_position"][2:]]
    far_gain = sum(gains) / len(gains)
    samples = [
        f"`{s['file']}`, {s['distinct_tokens']} distinct of {s['num_tokens']} tokens. "
        f"The prompt ends with\n\n{_fenced(s['prompt_end'])}\n\nand the model goes on\n\n"
        f"{_fenced(s['output'])}\n"
        for s in verdict["samples"]
    ]
    chats = [f"> {c['question']}\n\n{_fenced(c['answer'])}\n" for c in verdict["chats"]]
    d_min, d_median, d_max = verdict["distinct_tokens_min_median_max"]
    layers, kv_heads = config["num_hidden_layers"], config["num_key_value_heads"]
    text = CARD.format(
        parameters=log["parameters"],
        layers=layers,
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=kv_heads,
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        kv_bytes=2 * 2 * layers * kv_heads * config["head_dim"],
        vocab=config["vocab_size"],
        python=platform.python_version(),
        files=log["files"],
        corpus_tokens=log["corpus_tokens"],
        held_out_files=log["held_out_files"],
        training=_training(runs, verdict["prompts"]),
        far_changes="lowers" if far_gain >= 0 else "raises",
        far_gain=abs(far_gain),
        positions="\n".join(rows),
        new_tokens=NEW_TOKENS,
        d_min=d_min,
        d_median=d_median,
        d_max=d_max,
        distinct_all=verdict["distinct_tokens_all_prompts"],
        samples="\n".join(samples),
        chats="\n".join(chats),
        **{
            key: verdict[key]
            for key in (
                "held_out_tokens",
                "loss",
                "perplexity",
                "bits_per_byte",
                "long_rows",
                "prompts",
                "looping",
            )
        },
    )
    (folder / "README.md").write_text(text.rstrip() + "\n", encoding="utf-8")
