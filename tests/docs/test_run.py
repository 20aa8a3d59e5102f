"""Run the commands of the pages unchanged.

Blocks marked ``quick`` always run. ``make test-docs`` runs all others, servers included.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.docs.pages import Block, Page, pages
from tests.docs.running import RunError, run_blocks
from tests.docs.shape import missing_line

ALL = os.environ.get("KVTIER_DOCS") == "all"


def _chosen(page: Page) -> list[Block]:
    return [block for block in page.blocks if block.is_run and (ALL or block.marks.quick)]


def _compare(page: Page, block: Block, printed: str) -> None:
    said = page.printed_by(block)
    missing = None if said is None else missing_line(said, printed)
    if missing is not None:
        raise RunError(f"{block.where} does not print {missing!r}, but:\n{printed}")


@pytest.mark.engine
@pytest.mark.timeout(1200 if ALL else 300)
@pytest.mark.parametrize(
    "page", [page for page in pages() if _chosen(page)], ids=lambda page: page.path
)
def test_commands_do_what_the_page_says(page: Page, tmp_path: Path) -> None:
    chosen = _chosen(page)
    printed = run_blocks(chosen, tmp_path / "here")
    for block, text in zip(chosen, printed, strict=True):
        _compare(page, block, text)


def test_some_pages_are_run() -> None:
    """A change of the marks that excluded all pages would otherwise go unnoticed."""
    assert sum(len(_chosen(page)) for page in pages()) >= (30 if ALL else 5)
