"""Converts text to tokens and back, token by token."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvtier.engine.checkpoint import reading
from kvtier.errors import ConfigError

KEPT_VARIABLES = frozenset(
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
) | {"messages", "raise_exception", "strftime_now"}
"""Variables that requests may not set: arguments of transformers, and what it sets itself."""

_UNFINISHED = "\ufffd"

_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")
"""Vocabulary files of the different tokenizers."""


class Tokenizer:
    """The model's tokenizer, from its local directory."""

    def __init__(self, directory: Path) -> None:
        if not any(path for form in _FILES for path in directory.glob(form)):
            raise _missing(directory)
        with reading(f"the tokenizer in {directory}"):
            self._tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            own = self._tokenizer.get_vocab().keys() - self._tokenizer.get_added_vocab().keys()
        if not own:  # some tokenizers load without their files, with an empty vocabulary
            raise _missing(directory)
        self._texts: dict[int, str] = {}
        self._tokenizer.model_max_length = sys.maxsize  # the engine refuses what is too long

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def own(self) -> PreTrainedTokenizerBase:
        """The tokenizer of transformers."""
        found: PreTrainedTokenizerBase = self._tokenizer
        return found

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the token ids of ``text``.

        special_tokens: whether the tokenizer adds its own, such as BOS. The text of
        ``render_chat`` has them already.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, including special ones."""
        text = self._texts.get(token_id)
        if text is None:
            text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
            self._texts[token_id] = text
        return text

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
        *,
        for_answer: bool = True,
    ) -> str:
        """Return the text of a conversation, by the model's chat template.

        tools: functions that the model may call, as in the OpenAI API.
        variables: further variables of the template. Raises ``ValueError`` for one that
        transformers keeps for itself.
        for_answer: whether the assistant's next turn follows.
        """
        variables = variables or {}
        if kept := sorted(KEPT_VARIABLES & variables.keys()):
            raise ValueError(f"{kept[0]} is no variable of templates")
        render = cast("Callable[..., str]", self._tokenizer.apply_chat_template)
        text = render(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=for_answer,
            tokenize=False,
            **variables,
        )
        return str(text)

    @cached_property
    def max_token_bytes(self) -> int:
        """UTF-8 bytes of the longest token's text.

        A text with more bytes per token of a context does not fit into it. (If a tokenizer first
        shortens the text, for example by composing accents, this holds for any text that has other
        words than the longest token.)
        """
        added = self._tokenizer.get_added_vocab()
        tokens = [token for token in self._tokenizer.get_vocab() if token not in added]
        # In a byte-level vocabulary each character stands for a byte.
        is_byte_level = set().union(*tokens) <= set(ByteLevel.alphabet())
        own = max(len(token) if is_byte_level else len(token.encode()) for token in tokens)
        return max([own, *(len(token.encode()) for token in added)])

    def detokenizer(self) -> Detokenizer:
        """Return a new detokenizer for one stream of tokens."""
        return Detokenizer(self)


class Detokenizer:
    """Text of a growing sequence, returned once it is certain: never half a character.

    A token's text may depend on its neighbours. Therefore the last few tokens are decoded again
    with each new one, and only the difference is returned.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._given = 0

    def push(self, token_id: int) -> str:
        """Add a token. Return the text that became certain; often its own, sometimes none."""
        self._ids.append(token_id)
        return self._take(hold=True)

    def flush(self) -> str:
        """Return the text that was held back, as far as it can be displayed."""
        return self._take(hold=False)

    def _take(self, hold: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._given])
        text = self._tokenizer.decode(self._ids[self._context :])
        if hold and text.endswith(_UNFINISHED):
            return ""
        self._context, self._given = self._given, len(self._ids)
        return text[len(before) :]


def _missing(directory: Path) -> ConfigError:
    return ConfigError(f"model: {directory} has no tokenizer; put the model's tokenizer.json there")
