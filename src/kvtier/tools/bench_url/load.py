"""Send conversations that share a prefix to a server, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import perf_counter

from kvtier.core.config import setting
from kvtier.core.errors import ConfigError
from kvtier.tools.bench_url.exchange import Endpoint, Exchange, FailedRequestError
from kvtier.tools.report.corpus import Corpus
from kvtier.tools.report.progress import Progress

SAMPLE_CHARACTERS = 2048
"""Length of the text with which characters per token are measured."""
SAMPLE_BEGINNING = "Characters per token are measured by this text.\n"
"""First line of that text, so that no conversation shares a prefix with it."""
DISTINCT_CHARACTERS = 64
"""No two turns of the user begin with the same characters of this number."""
MAX_CHARACTERS_PER_TOKEN = 16.0


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Size of a load. Each request is one turn of a conversation."""

    requests: int = setting(100, "Total number of requests.", option={"min": 1})
    turns: int = setting(4, "Requests per conversation.", option={"min": 1})
    concurrency: int = setting(8, "Requests in flight at a time.", option={"min": 1, "max": 1024})
    shared_tokens: int = setting(
        500, "Tokens of the prefix that all conversations share.", option={"min": 0}
    )
    turn_tokens: int = setting(
        500, "Tokens that each turn adds to its conversation.", option={"min": 1}
    )
    max_tokens: int = setting(64, "Most tokens per answer.", option={"min": 1})
    seed: int = setting(0, "Seed of the prompts. Runs with equal seeds send equal prompts.")
    text: Sequence[Path] = setting(
        (), "File or directory to take prompts from.", shown="the interpreter's own library"
    )


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """An answer, and the number of its turn in the conversation, from 1."""

    turn: int
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All answers of a server, and the duration of the run."""

    endpoint: Endpoint
    options: LoadOptions
    answers: tuple[TurnAnswer, ...]
    failures: tuple[FailedRequestError, ...]
    wall_s: float

    @property
    def num_not_sent(self) -> int:
        """Number of turns that were not sent, since an earlier one failed."""
        return self.options.requests - len(self.answers) - len(self.failures)


class Conversation:
    """A conversation: the user's remaining texts, and the texts so far."""

    def __init__(self, texts: Sequence[str], max_tokens: int) -> None:
        self._rest = deque(texts)
        self._max_tokens = max_tokens
        self._said: list[str] = []

    @property
    def turn(self) -> int:
        """Number of the last turn sent, from 1."""
        return (len(self._said) + 1) // 2

    @property
    def has_more(self) -> bool:
        """Whether there is another turn to send."""
        return bool(self._rest)

    def ask(self, endpoint: Endpoint) -> Exchange:
        """Send the next turn. Raises ``FailedRequestError``."""
        self._said.append(self._rest.popleft())
        found = endpoint.ask(self._said, self._max_tokens)
        self._said.append(found.text)
        return found


def run_load(
    endpoint: Endpoint,
    options: LoadOptions,
    conversations: Sequence[Conversation],
    progress: Progress,
) -> LoadRun:
    """Send all conversations and return the answers.

    Turns are sent round robin: the next turn of a conversation is queued behind those that were due
    before it. A failed request ends its conversation.
    """
    progress.begin("requests", options.requests)
    due: SimpleQueue[Conversation | None] = SimpleQueue()
    done: SimpleQueue[tuple[Conversation, Exchange | BaseException]] = SimpleQueue()

    def work() -> None:
        while (each := due.get()) is not None:
            try:
                done.put((each, each.ask(endpoint)))
            except BaseException as error:
                done.put((each, error))

    for _ in range(options.concurrency):
        Thread(target=work, name="kvtier-bench-url", daemon=True).start()
    answers: list[TurnAnswer] = []
    failures: list[FailedRequestError] = []
    began = perf_counter()
    for each in conversations:
        due.put(each)
    num_open = len(conversations)
    while num_open:
        conversation, found = done.get()
        progress.advance()
        num_open -= 1
        if isinstance(found, Exchange):
            answers.append(TurnAnswer(conversation.turn, found))
            if conversation.has_more:
                due.put(conversation)
                num_open += 1
        elif isinstance(found, FailedRequestError):
            failures.append(found)
        else:
            raise found
    wall_s = perf_counter() - began
    for _ in range(options.concurrency):
        due.put(None)
    return LoadRun(endpoint, options, tuple(answers), tuple(failures), wall_s)


def make_conversations(endpoint: Endpoint, options: LoadOptions) -> list[Conversation]:
    """Cut conversations from text, with lengths measured by the server's tokenizer.

    Raises:
        ConfigError: the request that measures characters per token fails, or there is too little
            text.
    """
    corpus = Corpus(lambda text: [*map(ord, text)], options.text, options.seed, "characters")

    def cut(num: int, num_characters: int) -> list[str]:
        found = corpus.prompts(num, num_characters, DISTINCT_CHARACTERS)
        return ["".join(map(chr, each)) for each in found]

    (sample,) = cut(1, SAMPLE_CHARACTERS)
    per_token = _characters_per_token(endpoint, SAMPLE_BEGINNING + sample)
    length = max(1, round(options.turn_tokens * per_token))
    shared_length = round(options.shared_tokens * per_token)
    num_shared = -(-shared_length // length)
    texts = cut(num_shared + options.requests, length)
    shared, own = "".join(texts[:num_shared])[:shared_length], texts[num_shared:]
    conversations = []
    for start in range(0, options.requests, options.turns):
        first, *rest = own[start : start + options.turns]
        conversations.append(Conversation([shared + first, *rest], options.max_tokens))
    return conversations


def _characters_per_token(endpoint: Endpoint, text: str) -> float:
    try:
        found = endpoint.ask([text], max_tokens=1)
    except FailedRequestError as error:
        raise ConfigError(f"url: {endpoint.server}{endpoint.path}: {error}") from error
    if not found.prompt_tokens:
        raise ConfigError(f"url: {endpoint.server} does not report usage.prompt_tokens")
    return min(len(text) / found.prompt_tokens, MAX_CHARACTERS_PER_TOKEN)
