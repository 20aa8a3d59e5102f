"""One choice of an answer: turns tokens into text, cut at stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.serve.engine import Detokenizer, Token


class StopMatcher:
    """Passes text through until a stop string occurs in it.

    The emitted pieces together are the whole text, cut at the first position where a stop string
    begins, however the text was split. Text that may still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._pending = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Add text. Return the text that is certain now."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        self._pending += text
        found, held = self._found(), self._held()
        if found is not None and found <= held:
            return self._cut(found)
        # An earlier, incomplete stop string may still be completed, before the complete one.
        given, self._pending = self._pending[:held], self._pending[held:]
        return given

    def flush(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        found = self._found()
        if found is not None:
            return self._cut(found)
        given, self._pending = self._pending, ""
        return given

    def _cut(self, at: int) -> str:
        given, self._pending = self._pending[:at], ""
        self.stopped = True
        return given

    def _found(self) -> int | None:
        """Return where the first complete stop string begins."""
        places = (self._pending.find(stop) for stop in self._stops)
        return min((place for place in places if place >= 0), default=None)

    def _held(self) -> int:
        """Return where the longest tail begins that a stop string continues; the end if none."""
        end = len(self._pending)
        longest = max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), end + 1))
                if self._pending.endswith(stop[:length])
            ),
            default=0,
        )
        return end - longest


@dataclass(frozen=True, slots=True)
class TextToken:
    """A generated token and the offset of its text, in characters from the start of the answer."""

    token: Token
    offset: int


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that became certain, with its tokens. finish_reason: only in the last piece."""

    text: str
    tokens: tuple[TextToken, ...]
    finish_reason: str | None = None


class AnswerChoice:
    """Collects the tokens of one engine request.

    prefix: text to emit before the first token's.
    min_tokens: stop strings do not count in the text of this number of tokens.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        prefix: str = "",
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._prefix = prefix
        self._held: deque[tuple[TextToken, int]] = deque()
        self._num_pushed = 0
        self._num_given = 0
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._matcher.stopped

    def push(self, token: Token) -> TextPiece:
        """Add a token. Return the text that it made certain, possibly empty.

        Tokens after a stop string are ignored.
        """
        if self.stopped:
            return TextPiece("", ())
        self.num_tokens += 1
        text = self._detokenizer.push(token.token_id)
        start, self._num_pushed = self._num_pushed, self._num_pushed + len(text)
        self._held.append((TextToken(token, start), self._num_pushed))
        is_early = self.num_tokens <= self._min_tokens
        return self._give(text if is_early else self._matcher.push(text))

    def push_prompt(self, tokens: Sequence[Token], offsets: Sequence[int]) -> TextPiece:
        """Return the prefix with the prompt's tokens; before any generated one.

        offsets: of their texts in the prefix. Those of generated tokens go on after it.
        """
        prefix, self._prefix = self._prefix, ""
        self._num_pushed = self._num_given = len(prefix)
        texts = map(TextToken, tokens, offsets)
        return TextPiece(prefix, tuple(texts))

    def finish(self, reason: str) -> TextPiece:
        """Return the last piece. reason: why the engine ended; a stop string overrides it."""
        if not self.stopped:
            text = self._matcher.push(self._detokenizer.flush())
            given = self._give(text if self.stopped else text + self._matcher.flush())
        else:
            given = TextPiece("", ())
        tokens = given.tokens
        if not self.stopped:
            tokens += tuple(token for token, _ in self._held)
        self._held.clear()
        return TextPiece(given.text, tokens, "stop" if self.stopped else reason)

    def _give(self, text: str) -> TextPiece:
        self._num_given += len(text)
        tokens = []
        while self._held and self._is_given(*self._held[0]):
            tokens.append(self._held.popleft()[0])
        prefix, self._prefix = self._prefix, ""
        return TextPiece(prefix + text, tuple(tokens))

    def _is_given(self, token: TextToken, end: int) -> bool:
        """Whether the token's text was emitted; in a cut answer, whether some of it was.

        A token without text, such as a part of a character, is emitted with the text after it.
        """
        return token.offset < self._num_given and (self.stopped or end <= self._num_given)
