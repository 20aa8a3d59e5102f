"""Every test that the security page names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)?(?:::(test_\w+))?`")


def test_every_test_that_the_security_page_names_is_there() -> None:
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    file, num_named = "", 0
    for path, name in NAMED.findall(page):
        file = path or file
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source, f"{file} has no {name}"
        num_named += 1
    assert num_named > 20, "the page names its tests in another way"
