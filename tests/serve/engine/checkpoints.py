"""Checkpoints of the built-in model that tests may change or damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvtier.serve.engine.model_names import BUILTIN, DEFAULT

BLANK = "\u2581"

Tensors = dict[str, torch.Tensor]


def checkpoint(folder: Path, **changes: object) -> Path:
    """Return a copy of the built-in model; ``changes`` replace fields of its config.json."""
    shutil.copytree(BUILTIN / DEFAULT, folder)
    change_json(folder / "config.json", **changes)
    return folder


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(model: Path, change: Callable[[Tensors], object]) -> None:
    """Apply ``change`` to the weights, and save them."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def save_sentencepiece(folder: Path) -> int:
    """Write a tokenizer like Llama 2's. Return the size of its vocabulary."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), BLANK]
    tokens += map(chr, range(33, 127))
    merges = []
    for word in (f"{BLANK}hello", f"{BLANK}harness"):
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            tokens.append(word[: end + 1])
    vocabulary = {token: at for at, token in enumerate(dict.fromkeys(tokens))}
    made = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=list(dict.fromkeys(merges)),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(BLANK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return len(vocabulary)


def sentencepiece_model(folder: Path) -> Path:
    """Return a small Llama with random weights and a tokenizer like Llama 2's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=save_sentencepiece(folder),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
