"""Prefix reuse for a transformers model, in one line: the built-in model, and a chat.

    python examples/transformers_attach.py

Each turn of a chat has all earlier ones in front of it. Attached, the model computes only what is
new. A second process finds the KV on disk: give a folder for it as the first argument, and run it
twice.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import logging

import kvtier

MODEL = Path(kvtier.__file__).parent / "serve" / "engine" / "builtin" / "kvtier-tiny"
QUESTIONS = ("What does it do?", "How do I add an option?", "And a command of its own?")


def main(folder: str = "") -> None:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    talk = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(MODEL))
    source = Path(argparse.__file__).read_text(encoding="utf-8")[:16_000]
    system = {"role": "system", "content": f"Explain this module:\n{source}"}

    def chat(**options: int) -> tuple[list[dict[str, str]], float]:
        """Hold a chat; return its messages, and the seconds that it took."""
        began, messages = time.perf_counter(), [system]
        for question in QUESTIONS:
            messages = [*messages, {"role": "user", "content": question}]
            found = talk(messages, max_new_tokens=16, do_sample=False, **options)
            messages = found[0]["generated_text"]
        return messages, time.perf_counter() - began

    alone, alone_s = chat(prefill_chunk_size=256)
    print(f"alone:    {alone_s:6.2f} s")

    kvtier.attach(model, host_capacity="256MiB", disk_path=folder, disk_capacity="256MiB")

    for turn in ("attached:", "again:   "):
        before = model.kvtier.stats()
        messages, took_s = chat()
        after = model.kvtier.stats()
        num_reused = after.num_reused_tokens - before.num_reused_tokens
        num_tokens = after.num_prompt_tokens - before.num_prompt_tokens
        print(f"{turn} {took_s:6.2f} s, {num_reused} of {num_tokens} prompt tokens reused")
        print("          the same answers:", messages == alone)
    print("reused from:", ", ".join(after.reused_tokens))
    model.kvtier.detach()


if __name__ == "__main__":
    main(*sys.argv[1:2])
