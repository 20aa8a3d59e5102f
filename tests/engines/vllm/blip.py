"""A vision model of random weights, small enough for a test; vLLM needs no torchvision for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    OPTConfig,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from tests.engines.vllm.engines import MODEL

PIXELS, PATCH = 56, 14
IMAGE_TOKENS = 16
"""They stand before a prompt's text."""


def make_blip(folder: Path) -> Path:
    """Save the model, its tokenizer and its image processor into ``folder``."""
    images = BlipImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    processor = Blip2Processor(images, tokenizer, num_query_tokens=IMAGE_TOKENS)
    vision = Blip2VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=PIXELS,
        patch_size=PATCH,
    )
    queries = Blip2QFormerConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        encoder_hidden_size=64,
        cross_attention_frequency=1,
    )
    text = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        ffn_dim=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        word_embed_proj_dim=128,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    config = Blip2Config(
        vision_config=vision.to_dict(),
        qformer_config=queries.to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),  # type: ignore[arg-type]
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config)
    with torch.no_grad():  # or an image is too faint to be seen in the answer
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.2)
        model.query_tokens.normal_()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def picture(seed: int) -> Image.Image:
    """Return an image that is unique to the seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
