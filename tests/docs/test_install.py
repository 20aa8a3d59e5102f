"""Messages and pages describe the installation of kvtier with the same commands."""

from __future__ import annotations

import re
import tomllib

from kvtier.core.errors import INSTALL, install_command
from tests.docs.pages import ROOT, pages

OWN_WORDING = re.compile(r"""['"` ](?:kvtier|\.)\[\w+\]|pip install[^\n]*kvtier""")
"""An extra of this package, named without ``install_command``."""


def test_messages_take_the_command_from_one_place() -> None:
    """Each message names an extra through ``install_command``."""
    named: set[str] = set()
    for path in ROOT.glob("src/kvtier/**/*.py"):
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"""install_command\(['"](\w+)['"]\)""", text))
        if path.name != "errors.py":
            assert not OWN_WORDING.search(text), path
    assert INSTALL.format(extra="s3") == install_command("s3")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"engine", "s3", "events"} <= named <= set(project["optional-dependencies"])


def test_pages_and_unit_files_say_what_messages_say() -> None:
    """A page names kvtier's release in a package index only once messages do."""
    command = re.search(r'pip install "(.+)\[', INSTALL)
    assert command is not None
    released = command[1] == "kvtier"
    texts = {page.path: page.text for page in pages()}
    for path in (*ROOT.glob("deploy/**/*"), ROOT / "CHANGELOG.md"):
        if path.is_file():
            texts[str(path)] = path.read_text(encoding="utf-8")
    for name, text in texts.items():
        for found in re.findall(r'pip install [^\n`]*?"?(kvtier|\.)\[\w+', text):
            assert released or found == ".", name
        assert released or "kvtier[" not in text, name
