"""Pages of the documentation, and their blocks of code.

An HTML comment in front of a block, which readers do not see, decides how the block is tested:

    (nothing)                           shell: run as it stands, by ``make test-docs``
    <!-- quick -->                      run in the usual tests, too
    <!-- run -->                        Python: run, as a shell block is
    <!-- exits N -->                    ends with N, and not with 0
    <!-- not run: what is not here -->  only parsed
    <!-- run by tests/FILE.py -->       that test runs it
    <!-- prints -->                     the output of the shell block before it, numbers aside
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELL, PYTHON, OUTPUT = "sh", "python", "text"
LANGUAGES = (SHELL, PYTHON, OUTPUT, "json", "yaml", "toml")
"""Languages that a block may have; one without a language may hide a command."""

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)(?P<rest>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
COMMENTS = re.compile(r"(?:<!--(?P<last>[^>]*)-->\s*)\Z")
INDENTED = re.compile(r"(?:\A|\n)[ ]*\n    (?![ ]*[-*+\d|])(?P<line>\S.*)")


class PageError(AssertionError):
    """A page that breaks a rule. The message names the place and the correction."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of the comment in front of a block."""

    quick: bool = False
    run: bool = False
    exits: int = 0
    not_run: str = ""
    run_by: str = ""
    prints: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. line: of its fence, from 1."""

    page: str
    line: int
    language: str
    text: str
    marks: Marks

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether the block is run here, unchanged."""
        if self.language == SHELL:
            return not (self.marks.not_run or self.marks.run_by)
        return self.marks.run

    @property
    def script(self) -> str:
        """Return the block as a shell script."""
        if self.language == PYTHON:
            return f"python - <<'END_OF_BLOCK'\n{self.text}END_OF_BLOCK\n"
        return self.text


@dataclass(frozen=True, slots=True)
class Page:
    """A page, its path from the repository's root, and its blocks in order."""

    path: str
    text: str
    blocks: tuple[Block, ...]

    @property
    def prose(self) -> str:
        """Return the page without its blocks; line numbers stay the same."""
        return FENCE.sub(lambda found: "\n" * found[0].count("\n"), self.text)

    def printed_by(self, block: Block) -> str | None:
        """Return the output that the page claims for ``block``; None if it claims nothing."""
        after = self.blocks[self.blocks.index(block) + 1 :]
        return after[0].text if after and after[0].marks.prints else None


def read_page(path: str, text: str) -> Page:
    """Parse a page. Raises ``PageError`` for an unknown mark."""
    blocks: list[Block] = []
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        comment = COMMENTS.search(text[: found.start()])
        marks = _marks(comment["last"].strip() if comment else "", f"{path}:{line}")
        indent = len(found["indent"])
        lines = [splitline[indent:] for splitline in found["text"].splitlines()]
        language = found["language"] + found["rest"]
        blocks.append(Block(path, line, language, "\n".join(lines) + "\n", marks))
    return Page(path, text, tuple(blocks))


def _marks(comment: str, where: str) -> Marks:
    if not comment:
        return Marks()
    if comment.startswith("not run:"):
        return Marks(not_run=comment.removeprefix("not run:").strip())
    if comment.startswith("run by "):
        return Marks(run_by=comment.removeprefix("run by ").strip())
    words = [word.strip() for word in comment.split(",")]
    flags = {word for word in words if word in ("quick", "run", "prints")}
    exits = 0
    for word in words:
        if word in flags:
            continue
        if number := re.fullmatch(r"exits (\d+)", word):
            exits = int(number[1])
        else:
            raise PageError(f"{where}: nobody knows the mark {word!r}; tests/docs/pages.py has all")
    return Marks("quick" in flags, "run" in flags, exits, prints="prints" in flags)


@cache
def pages() -> tuple[Page, ...]:
    """Return the pages for readers: README, CONTRIBUTING, benchmarks, examples and docs."""
    paths = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    for folder in ("benchmarks", "examples", "docs"):
        paths += sorted(ROOT.glob(f"{folder}/**/*.md"))
    return tuple(
        read_page(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in paths
    )


def blocks(language: str = SHELL) -> Iterator[Block]:
    """All blocks of a language, of all pages."""
    for page in pages():
        yield from (block for block in page.blocks if block.language == language)


def blocks_run_by(test_file: str) -> list[Block]:
    """Return the blocks that a test of its own runs. test_file: its path below the repository."""
    return [block for block in blocks() if block.marks.run_by == test_file]
