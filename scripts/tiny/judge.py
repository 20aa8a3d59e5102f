"""Quality of the model on unseen text, and samples of its answers."""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers import Qwen3ForCausalLM as Model

from . import corpus
from .corpus import Document
from .export import END_OF_TEXT_ID
from .forward import forward, rope_table

BUCKET = 512
LONG_ROW = 4096
PROMPT_TOKENS = 3500
NEW_TOKENS = 60
NUM_PROMPTS = 20
QUESTIONS = (
    "Hello!",
    "What does os.path.join do?",
    "What is a KV cache?",
    "What is the module json for?",
    "Write the function bisect.bisect_left.",
)


def held_out_rows(
    tokenizer: PreTrainedTokenizerFast, documents: list[Document], length: int
) -> Tensor:
    """Return rows [n, length + 1] that lie inside one held-out file each."""
    rows = []
    for document in documents:
        if document.held_out:
            ids = [END_OF_TEXT_ID, *tokenizer(document.text).input_ids]
            rows += [ids[i : i + length + 1] for i in range(0, len(ids) - length, length)]
    return torch.tensor(rows)


@torch.inference_mode()
def token_losses(model: Model, rows: Tensor) -> Tensor:
    """Return the loss of each token in nats, [n, length]."""
    length = rows.shape[1] - 1
    cos, sin = rope_table(model, length)
    losses = []
    step = max(1, 4096 // length)
    for part in rows.split(step):
        logits = forward(model, part[:, :-1], cos, sin)
        flat = functional.cross_entropy(logits, part[:, 1:].reshape(-1), reduction="none")
        losses.append(flat.view(len(part), length))
    return torch.cat(losses)


def losses_by_position(model: Model, rows: Tensor) -> list[dict[str, object]]:
    """Return the loss per bucket of positions, with all context and with only the nearest.

    rows [n, LONG_ROW + 1]. The second loss is of the same tokens with 512 to 1,023 tokens of
    context. It is lower than the first if the model can't use far positions.
    """
    full = token_losses(model, rows).view(len(rows), -1, BUCKET).mean(dim=(0, 2))
    num_buckets = LONG_ROW // BUCKET
    windows = torch.cat(
        [rows[:, i * BUCKET : (i + 2) * BUCKET + 1] for i in range(num_buckets - 1)]
    )
    near = token_losses(model, windows)[:, BUCKET:].reshape(num_buckets - 1, -1).mean(dim=1)
    return [
        {
            "positions": f"{i * BUCKET}-{(i + 1) * BUCKET}",
            "loss": round(float(full[i]), 3),
            "loss_near_context": round(float(near[i - 1]), 3) if i else None,
        }
        for i in range(num_buckets)
    ]


def greedy(model: Model, tokenizer: PreTrainedTokenizerFast, ids: list[int], n: int) -> list[int]:
    """Return the n tokens (fewer at an end token) that greedy decoding adds to ``ids``."""
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=n,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return [int(i) for i in out[0, len(ids) :]]


def looping(ids: list[int]) -> bool:
    """Return whether the second half is one passage that repeats."""
    tail = ids[len(ids) // 2 :]
    return len(ids) >= NEW_TOKENS and any(
        tail[period:] == tail[:-period] for period in range(1, len(tail) // 2 + 1)
    )


def judge(folder: Path, num_prompts: int = NUM_PROMPTS) -> dict[str, object]:
    """Measure the quality figures of the model card, on the folder's own files."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    ).eval()
    documents = corpus.read_library()
    held_out = [d for d in documents if d.held_out]
    rows = held_out_rows(tokenizer, documents, 1024)
    loss = float(token_losses(model, rows).mean())
    num_bytes = sum(len(tokenizer.decode(r[1:]).encode()) for r in rows)
    bits = loss * rows[:, 1:].numel() / math.log(2)
    long_rows = held_out_rows(tokenizer, documents, LONG_ROW)

    texts = {d.name: tokenizer(d.text).input_ids for d in held_out}
    texts = {name: ids for name, ids in texts.items() if len(ids) > PROMPT_TOKENS + NEW_TOKENS}
    rng = random.Random(0)
    outputs, samples = [], []
    for i in range(num_prompts):
        name = sorted(texts)[i % len(texts)]
        start = rng.randrange(len(texts[name]) - PROMPT_TOKENS - NEW_TOKENS)
        prompt = texts[name][start : start + PROMPT_TOKENS]
        new = greedy(model, tokenizer, prompt, NEW_TOKENS)
        outputs.append(new)
        if i < 3:
            samples.append(
                {
                    "file": name,
                    "prompt_end": tokenizer.decode(prompt[-30:]),
                    "output": tokenizer.decode(new),
                    "distinct_tokens": len(set(new)),
                    "num_tokens": len(new),
                }
            )
    chats = []
    for question in QUESTIONS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )["input_ids"]
        answer = tokenizer.decode(greedy(model, tokenizer, ids, 300), skip_special_tokens=True)
        chats.append({"question": question, "answer": answer.strip()})
    distinct = sorted(len(set(o)) for o in outputs)
    return {
        "held_out_tokens": rows[:, 1:].numel(),
        "loss": round(loss, 3),
        "perplexity": round(math.exp(loss), 2),
        "bits_per_byte": round(bits / num_bytes, 3),
        "long_rows": len(long_rows),
        "by_position": losses_by_position(model, long_rows),
        "prompts": num_prompts,
        "distinct_tokens_min_median_max": (distinct[0], distinct[len(distinct) // 2], distinct[-1]),
        "distinct_tokens_all_prompts": len({t for o in outputs for t in o}),
        "looping": sum(map(looping, outputs)),
        "samples": samples,
        "chats": chats,
    }
