"""Rows of tokens for training and for judging."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .chat import ChatMaker
from .corpus import Document
from .export import END_OF_TEXT_ID

CHAT_SHARE = 0.15
LONG_CHAT_SHARE = 0.3  # of the chat samples, counted in tokens
CHARS_PER_TOKEN = 3


class Rows:
    """Packed rows of the corpus mixed with chat samples; every epoch is shuffled anew."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        documents: list[Document],
        topics: dict[str, str],
        seed: int,
    ) -> None:
        self._encode = tokenizer.backend_tokenizer.encode_batch
        self._chat = ChatMaker(documents, topics)
        self._rng = random.Random(seed)
        texts = [d.text for d in documents] + list(topics.values())
        self._texts = [np.array([*e.ids, END_OF_TEXT_ID]) for e in self._encode(texts)]
        self.num_corpus_tokens = sum(map(len, self._texts))
        self.num_epochs = 0

    def _chat_pieces(self, num_tokens: int, length: int) -> list[np.ndarray]:
        """Whole conversations; long ones are cut so that they fill most of one row."""
        pieces: list[np.ndarray] = []
        for share, long in ((1 - LONG_CHAT_SHARE, False), (LONG_CHAT_SHARE, True)):
            left = int(num_tokens * share)
            while left > 0:
                if long:
                    limit = self._rng.uniform(0.3, 0.75) * length * CHARS_PER_TOKEN
                    drawn = [self._chat.long(self._rng, int(limit)) for _ in range(32)]
                else:
                    drawn = [self._chat.short(self._rng) for _ in range(256)]
                for e in self._encode(drawn):
                    if left <= 0:
                        break
                    if len(e.ids) <= 1.2 * length:
                        pieces.append(np.array([*e.ids, END_OF_TEXT_ID]))
                        left -= len(e.ids)
        return pieces

    def _epoch(self, length: int) -> Iterator[np.ndarray]:
        chat = self._chat_pieces(
            int(self.num_corpus_tokens * CHAT_SHARE / (1 - CHAT_SHARE)), length
        )
        texts = list(self._texts)
        self._rng.shuffle(chat)
        self._rng.shuffle(texts)
        rows: list[np.ndarray] = []
        for group in (texts, chat):
            stream = np.concatenate(group)
            start = self._rng.randrange(length)
            rows += [stream[i : i + length + 1] for i in range(start, len(stream), length)]
        rows = [r for r in rows if len(r) == length + 1]
        self._rng.shuffle(rows)
        self.num_epochs += 1
        yield from rows

    def batches(self, length: int, num_tokens: int) -> Iterator[Tensor]:
        """Endless batches [num_tokens // length, length + 1]."""
        rows = self._epoch(length)
        while True:
            batch: list[np.ndarray] = []
            while len(batch) < num_tokens // length:
                row = next(rows, None)
                if row is None:
                    rows = self._epoch(length)
                    continue
                batch.append(row)
            yield torch.from_numpy(np.stack(batch).astype(np.int64))
