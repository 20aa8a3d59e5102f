"""Converts text to tokens and back, token by token."""

from __future__ import annotations

import inspect
import re
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple, cast

from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvtier.core.errors import ConfigError
from kvtier.serve.engine.checkpoint import reading

KEPT_VARIABLES = frozenset(
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
) | {"messages", "raise_exception", "strftime_now"}
"""Variables that requests may not set: arguments of transformers, and what it sets itself."""

_UNFINISHED = "\ufffd"
MAX_HELD = 4
"""Most tokens held back whose bytes are not known: a character has no more bytes."""

_BYTES: dict[str, int] = {
    character: byte
    for byte, character in bytes_to_unicode().items()  # type: ignore[no-untyped-call]
}
"""Bytes by the characters that stand for them in byte-level vocabularies."""

_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")
"""Vocabulary files of the different tokenizers."""


class TokenText(NamedTuple):
    """Text of one token behind other text.

    text: with special tokens.
    is_silent: decoded text leaves the token out.
    part: bytes of a token that may be a part of a character; None if it is none, or not known.
    """

    text: str
    is_silent: bool
    part: bytes | None


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
        self._texts: dict[int, TokenText] = {}
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
        """Return the text of one token behind other text, including special ones."""
        return self.token(token_id).text

    def token(self, token_id: int) -> TokenText:
        """Return what one token adds to a text."""
        found = self._texts.get(token_id)
        if found is None:
            is_silent = self.decode([*self._before, token_id]) == self.decode(self._before)
            text = self._text_of(token_id)
            part = None if is_silent else self._bytes_of(token_id, text)
            found = self._texts[token_id] = TokenText(text, is_silent, part)
        return found

    def _text_of(self, token_id: int) -> str:
        if token_id not in self._tokenizer.added_tokens_decoder:
            before = self.decode(self._before)
            text = self.decode([*self._before, token_id])
            if text.startswith(before):
                return text[len(before) :]
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _bytes_of(self, token_id: int, text: str) -> bytes | None:
        """Return the bytes that a token of a known form stands for."""
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if written := re.fullmatch("<0x([0-9A-F]{2})>", token):
            # All of them: their decoder gives up each byte of a row if one of it is wrong.
            byte = bytes.fromhex(written[1])
            return byte if byte.decode(errors="replace") == text else None
        if _UNFINISHED in text and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        return None

    @cached_property
    def _before(self) -> list[int]:
        """A token with a text, as those before another token.

        Decoders of SentencePiece leave out the blank at the beginning of a text.
        """
        tokens = self.encode("a")[-1:]
        return tokens if self.decode(tokens).strip() == "a" else []

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

    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        """Return a new detokenizer for one stream of tokens.

        before: tokens of the text that the stream continues.
        """
        return Detokenizer(self, before)


class Detokenizer:
    """Text of a growing sequence, returned once it is certain: never half a character.

    A token's text may depend on the tokens before it, so it is decoded with the last ones. Bytes of
    characters are joined here: three of them at most are held back, and what is no character
    becomes a replacement character.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        texts = (
            token_id for token_id in reversed(before) if not tokenizer.token(token_id).is_silent
        )
        self._context = list(islice(texts, 1))
        self._characters = getincrementaldecoder("utf-8")("replace")
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token. Return the text that became certain; often its own, sometimes none."""
        token = self._tokenizer.token(token_id)
        if token.is_silent:
            return ""
        if token.part is None:
            self._held.append(token_id)
            return self._characters.decode(b"", final=True) + self._take(hold=True)
        text = self._take(hold=False) + self._characters.decode(token.part)
        self._context = [token_id]
        return text

    def flush(self) -> str:
        """Return the text that was held back, as far as it can be displayed."""
        return self._take(hold=False) + self._characters.decode(b"", final=True)

    def _take(self, hold: bool) -> str:
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + self._held)
        if hold and text.endswith(_UNFINISHED) and len(self._held) < MAX_HELD:
            return ""
        self._context, self._held = self._held, []
        return text[len(before) :]


def _missing(directory: Path) -> ConfigError:
    return ConfigError(f"model: {directory} has no tokenizer; put the model's tokenizer.json there")
