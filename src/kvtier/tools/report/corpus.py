"""Prompts of an exact length, cut from real text."""

from __future__ import annotations

import os
import platform
import random
import sysconfig
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvtier.core.errors import ConfigError

Prompt = tuple[int, ...]

SKIPPED_DIRS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TEXT_SUFFIXES = {".py", ".txt", ".rst", ".md"}


class Corpus:
    """Text as one sequence of tokens, read and tokenized only as far as needed.

    The same files, seed and tokenizer give the same prompts on every machine.

    Args:
        encode: convert text to token ids.
        paths: files and directories; none for the source code and documentation in the
            interpreter's own library.
        seed: order in which files are read.
        unit: name of the tokens, for messages.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        paths: Sequence[Path] = (),
        seed: int = 0,
        unit: str = "tokens",
    ) -> None:
        self._encode = encode
        self._unit = unit
        self._tokens = array("q")
        files = sorted(_given_files(paths)) if paths else sorted(_library_files())
        random.Random(seed).shuffle(files)
        self._rest = iter(files)
        self.source = (
            ", ".join(str(path) for path in paths)
            if paths
            else f"the standard library of Python {platform.python_version()}"
        )

    def prompts(self, num_prompts: int, num_tokens: int, distinct_tokens: int) -> list[Prompt]:
        """Return ``num_prompts`` prompts of exactly ``num_tokens`` tokens, without overlaps.

        Each call starts at the beginning of the text. Raises ``ConfigError`` if it is too short.

        distinct_tokens: no two prompts agree in this number of first tokens. With the block size,
        they share no block.
        """
        chosen: list[Prompt] = []
        beginnings: set[Prompt] = set()
        start = 0
        while len(chosen) < num_prompts:
            while len(self._tokens) < start + num_tokens:
                if not self._read_more():
                    raise ConfigError(
                        f"text: {self.source} has {len(self._tokens):,} {self._unit}, enough for "
                        f"{len(chosen)} of {num_prompts} prompts of {num_tokens:,} {self._unit} "
                        "without repeating any; give more with --text, or ask for fewer or shorter "
                        "prompts"
                    )
            beginning = tuple(self._tokens[start : start + min(distinct_tokens, num_tokens)])
            if beginning in beginnings:  # a repeated licence text, say: begin a little later
                start += len(beginning)
                continue
            beginnings.add(beginning)
            chosen.append(tuple(self._tokens[start : start + num_tokens]))
            start += num_tokens
        return chosen

    def _read_more(self) -> bool:
        """Tokenize the next text file. Return False if there is none left."""
        for path in self._rest:
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip() and "\0" not in text:
                for piece in _pieces(text):
                    self._tokens.extend(self._encode(piece))
                return True
        return False


def _pieces(text: str, num_characters: int = 4096) -> Iterator[str]:
    """Yield pieces of ``text`` that end at a line end, as long as fit in ``num_characters``.

    Tokenizers warn about texts longer than their model's limit.
    """
    piece: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        if piece and length + len(line) > num_characters:
            yield "".join(piece)
            piece, length = [], 0
        piece.append(line)
        length += len(line)
    if piece:
        yield "".join(piece)


def with_other_ending(prompt: Prompt, num_shared: int, other: Prompt) -> Prompt:
    """Return a prompt of the same length that shares exactly the first ``num_shared`` tokens.

    other: source of the other tokens.
    """
    start = num_shared
    while start < len(other) and other[start] == prompt[num_shared]:
        start += 1
    missing = len(prompt) - num_shared
    ending = (other[start:] + other[:start])[:missing]
    if len(ending) < missing or ending[0] == prompt[num_shared]:
        raise ConfigError("text: it repeats itself too much to make prompts that end differently")
    return prompt[:num_shared] + ending


def _library_files() -> Iterator[Path]:
    for directory, below, names in os.walk(sysconfig.get_path("stdlib")):
        below[:] = [name for name in below if name not in SKIPPED_DIRS]
        for name in names:
            path = Path(directory, name)
            if path.suffix in TEXT_SUFFIXES and not name.startswith("_sysconfigdata"):
                yield path


def _given_files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_file():
            yield path
        elif path.is_dir():
            for found in path.rglob("*"):
                hidden = any(part.startswith(".") for part in found.relative_to(path).parts)
                if found.is_file() and not hidden:
                    yield found
        else:
            raise ConfigError(f"text: {path} is neither a file nor a directory")
