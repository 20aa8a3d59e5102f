"""Grammars that an answer has to follow, by llguidance (the extra ``grammar``).

A grammar is compiled once per request, on any thread. The engine's thread then asks for the tokens
that may follow, one token at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.core.errors import CacheError, install_command, printable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase


MAX_CHARACTERS = 128 << 10
"""Length of a grammar. llguidance limits the work on one, but that grows with its length."""


LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 150_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 25_000,
    "verbose_errors": False,
}
"""llguidance's limits. A grammar at all of them holds about 50 MiB; with its own defaults, 0.5 GiB.

A list of 128 KiB of words, or an object with 300 formatted fields, needs a third of them.
"""

MAX_REMAINDERS = 100_000
"""llguidance makes a state of each remainder of a multipleOf, and its limits don't count them.

100,000 take it 1.5 s and 40 MiB; 1,000,000 take 48 s and 0.4 GiB.
"""

NUM_TRIED = 16
"""Steps of an answer that are tried when a grammar is compiled."""


class GrammarError(CacheError, ValueError):
    """The grammar cannot be used; the message says why."""


class NoGrammarsError(GrammarError):
    """There are no grammars here: the library is missing, or the tokenizer is unfit."""


class Matcher:
    """Place of one answer in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Return which tokens may follow: bool [vocab_size]; none of them after an error.

        Text that has only one continuation is allowed in the tokenizer's own tokens only.
        """
        found = np.zeros(vocab_size, np.bool_)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():  # too complex to go on; the bits allow an end then
            return found
        known = np.unpackbits(bits, bitorder="little")[:vocab_size]
        found[: len(known)] = known
        return found

    def accept(self, token_id: int) -> None:
        """Go on by a token; an error if it is not allowed."""
        self._matcher.consume_token(token_id)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str:
        """Why the answer cannot go on; "" if it can."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""


class Grammar:
    """A compiled grammar."""

    def __init__(self, start: LLMatcher) -> None:
        self._start = start

    def matcher(self) -> Matcher:
        """Return a matcher at the grammar's start."""
        return Matcher(self._start.deep_copy())


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe.

    vocab_size: number of the model's logits.
    eos_token_ids: allowed where a grammar may end.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, len(tokenizer))
        self._eos = list(eos_token_ids)
        self._made: LLTokenizer | None = None
        self._lock = Lock()

    def compile(self, lark: str) -> Grammar:
        """Return a grammar.

        lark: in llguidance's dialect of Lark, with JSON schemas inside.

        Raises ``NoGrammarsError`` if there are none here, ``GrammarError`` if this one is wrong.
        """
        tokenizer = self._ready()
        from llguidance import LLMatcher, LLParserLimits

        if len(lark) > MAX_CHARACTERS:
            raise GrammarError(
                f"it has {len(lark)} characters, of {MAX_CHARACTERS} that are compiled at most"
            )
        if _has_many_remainders(lark):
            raise GrammarError(
                f"its multipleOf, together, have more than the {MAX_REMAINDERS} remainders that "
                "are compiled at most; use fewer, or rounder, numbers"
            )
        limits = LLParserLimits(**LIMITS)
        matcher = LLMatcher(tokenizer, lark, log_level=0, limits=limits)
        if not matcher.is_error():
            self._try(matcher)
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))
        return Grammar(matcher)

    def _try(self, start: LLMatcher) -> None:
        """Follow a grammar for some steps. Raise ``GrammarError`` if it exceeds the limits.

        The first tokens take the longest to find: do it here, not on the engine's thread.
        """
        matcher = start.deep_copy()
        for _ in range(NUM_TRIED):
            allowed = np.flatnonzero(Matcher(matcher).allowed(self._vocab_size))
            if matcher.is_error() or matcher.is_stopped() or not len(allowed):
                break
            matcher.consume_tokens(matcher.compute_ff_tokens() or [int(allowed[0])])
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))

    def _ready(self) -> LLTokenizer:
        """Return the tokenizer for llguidance; the first time takes up to seconds."""
        with self._lock:
            if self._made is None:
                try:
                    from llguidance.hf import from_tokenizer
                except ImportError as error:
                    raise NoGrammarsError(
                        "this server has no grammar library; its operator can add it: "
                        f"{install_command('grammar')}"
                    ) from error
                try:
                    self._made = from_tokenizer(
                        self._tokenizer,  # type: ignore[arg-type]  # refused if it is not fast
                        n_vocab=self._vocab_size,
                        eos_token=self._eos or None,
                    )
                except Exception as error:  # whatever the library dislikes about a tokenizer
                    why = " ".join(str(error).split()).rstrip(".")[:200]
                    raise NoGrammarsError(
                        f"the model's tokenizer is unfit for grammars ({why}); vLLM and SGLang may "
                        "have another grammar library for it"
                    ) from error
            return self._made


def _has_many_remainders(lark: str) -> bool:
    """Whether the least common multiple of all multipleOf is too large: schemas may join them."""
    together = 1
    for found in re.findall(r'"multipleOf": *([-+.\deE]+)', lark):
        digits = Decimal(found).normalize().as_tuple().digits
        together = math.lcm(together, int("".join(map(str, digits))) or 1)
        if together > MAX_REMAINDERS:
            return True
    return False


def _first_line(error: str) -> str:
    """Return llguidance's reason without the place in the grammar, which the server wrote."""
    line = error.replace("<non-verbose/>", "").strip().partition("\n")[0]
    return printable(re.sub(r"^at \d+\(\d+\): ", "", line)).rstrip(" .")[:200]
