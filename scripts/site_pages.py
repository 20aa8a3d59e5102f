"""Hooks of mkdocs, named in ``mkdocs.yml``, for pages outside of ``docs/``.

Pages link to each other as files of the repository, so that they can be read there, too. On the
site a link to a page stays one, and one to any other file becomes its name: nothing leads out.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # a hook is loaded by its path
from scripts.peers import SGLANG_VERSION, VLLM_VERSION  # noqa: E402

DOCS = "docs/"
BROUGHT = {
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks/index.md",
    **{
        f"benchmarks/{page.parent.name}/README.md": f"benchmarks/{page.parent.name}.md"
        for page in sorted(ROOT.glob("benchmarks/*/README.md"))
    },
    "examples/file_store/README.md": "file_store.md",
    "examples/router/README.md": "router.md",
    "README.md": "index.md",
}
"""Files of the repository that are pages, too; README stands for the page that begins like it."""

FENCED = re.compile(r"^( *```.*?^ *```[ ]*$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?P<label>[^\]\[]+)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
MARK = re.compile(r"^<!--.*?-->\n", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name versions below each page, and leave missing pages out of the navigation."""
    config.nav = _there(config.nav, Path(config.docs_dir))
    source = (ROOT / "src/kvtier/__init__.py").read_text(encoding="utf-8")
    version = re.search(r'__version__ = "(.+)"', source)
    assert version is not None
    config.copyright = (
        f"kvtier {version[1]}. The tests of this version ran the commands of these pages; those of "
        f"engines with vLLM {VLLM_VERSION} and SGLang {SGLANG_VERSION}."
    )
    return config


def _there(entry: Any, docs: Path) -> Any:
    """An entry of the navigation without pages that are not there; None for nothing left."""
    if isinstance(entry, list):
        return [kept for each in entry if (kept := _there(each, docs))]
    if isinstance(entry, dict):
        return {name: kept for name, each in entry.items() if (kept := _there(each, docs))}
    return entry if (docs / entry).is_file() or entry in BROUGHT.values() else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages that lie elsewhere in the repository."""
    for source, name in BROUGHT.items():
        if files.get_file_from_path(name) is None:
            content = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them, and no marks of tests."""
    name = page.file.src_uri
    if name.startswith("decisions/") or name in BROUGHT.values():
        page.meta["search"] = {"boost": 0.3}  # guides first
    brought = {page: source for source, page in BROUGHT.items() if source != "README.md"}
    source = brought.get(name, DOCS + name)

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found["target"]))
        if target in BROUGHT:
            there = BROUGHT[target]
        elif target.startswith(DOCS) and files.get_file_from_path(target.removeprefix(DOCS)):
            there = target.removeprefix(DOCS)
        elif (ROOT / target).exists():
            return found["label"]
        else:
            return found[0]  # wrong, which mkdocs says
        path = posixpath.relpath(there, posixpath.dirname(name) or ".")
        return f"[{found['label']}]({path}{found['anchor'] or ''})"

    pieces = FENCED.split(markdown)
    pieces[::2] = [LINK.sub(link, MARK.sub("", piece)) for piece in pieces[::2]]
    return "".join(pieces)
