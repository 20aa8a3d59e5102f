"""The source archive: files of the repository, and nothing else that is in a clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core")

ROOT = Path(__file__).resolve().parents[1]
OURS = ("pyproject.toml", ".gitignore", "CMakeLists.txt", "LICENSE", "README.md")
STRAYS = (
    "kv/data.slab",
    "cache of mine/blocks",
    "prompts.jsonl",
    "disk/data.slab",
    "examples/kv/data.slab",
    "server.log",
    ".env",
)


def test_a_cache_in_the_clone_is_not_packed(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for name in (*OURS, "src/kvtier/__init__.py", "examples/facade.py"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    for name in STRAYS:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text("a prompt")
    build = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, stdout=subprocess.DEVNULL)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        packed = {each.name.partition("/")[2] for each in file if each.isfile()}
    expected = {*OURS, "src/kvtier/__init__.py", "examples/facade.py", "PKG-INFO"}
    assert packed == expected


def test_every_tracked_entry_of_the_repository_is_listed_or_known_to_be_left_out() -> None:
    """An entry of the root that the list forgets would be missing from the archive."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("no clone")
    entries = {name.partition("/")[0] for name in tracked.stdout.splitlines()}
    text = (ROOT / "pyproject.toml").read_text()
    left_out = {entry for entry in entries if f'"!/{entry}"' not in text}
    tools_of_the_clone = {".ci", ".clang-format", ".dockerignore", ".github"}
    assert left_out == {*tools_of_the_clone, ".pre-commit-config.yaml"}
