"""Code from outside a model's folder is known by all its bytes, and by what it imports."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.identity import UnknownCodeError, code, code_digest, process_start_ns

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a file into a folder that modules are found in."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def made(name: str, text: str = "") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    made("acme_plugin/__init__.py", "from acme_plugin.model import Model\n")
    made("acme_plugin/model.py", "import math, acme_helper as helper\n\nclass Model: ...\n")
    made("acme_plugin/kernels/rope.cu", "1")
    made("acme_plugin/notes.txt", "1")
    made("acme_helper.py", "THETA = 1\n")
    return made


@pytest.mark.parametrize(
    "name", ["acme_plugin/model.py", "acme_plugin/kernels/rope.cu", "acme_helper.py"]
)
def test_each_file_of_the_code_counts(write: Write, name: str) -> None:
    before = code_digest(["acme_plugin.model"])
    assert code_digest(["acme_plugin"]) == before, "the package counts, whatever module is named"
    path = write("acme_plugin/notes.txt", "2")
    assert code_digest(["acme_plugin"]) == before
    path = path.parent.parent / name
    path.write_text(path.read_text() + "\n")
    assert code_digest(["acme_plugin"]) != before


def test_new_and_renamed_files_count(write: Write) -> None:
    before = code_digest(["acme_plugin"])
    added = write("acme_plugin/more.py", "")
    after = code_digest(["acme_plugin"])
    added.rename(added.with_name("other.py"))
    assert len({before, after, code_digest(["acme_plugin"])}) == 3


def test_packages_of_a_distribution_that_are_imported_count_with_its_version(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = SimpleNamespace(name="acme-helper", version="1", read_text=lambda _: None)
    monkeypatch.setattr(code, "packages_distributions", lambda: {"acme_helper": ["acme-helper"]})
    monkeypatch.setattr(code, "distribution", lambda _: owner)
    before = code_digest(["acme_plugin"])
    write("acme_helper.py", "THETA = 2\n")
    assert code_digest(["acme_plugin"]) == before
    owner.version = "2"
    assert code_digest(["acme_plugin"]) != before
    owner.read_text = lambda _: '{"dir_info": {"editable": true}}'
    worked_on = code_digest(["acme_plugin"])
    write("acme_helper.py", "THETA = 3\n")
    assert code_digest(["acme_plugin"]) != worked_on


def test_package_of_a_namespace_counts_without_its_siblings(write: Write) -> None:
    write("acme/plugin/__init__.py", "")
    write("acme/other/__init__.py", "1")
    before = code_digest(["acme.plugin.model.Model"])
    write("acme/other/__init__.py", "2")
    assert code_digest(["acme.plugin"]) == before
    write("acme/plugin/__init__.py", "2")
    assert code_digest(["acme.plugin"]) != before


def test_known_packages_and_the_standard_library_are_left_out(write: Write) -> None:
    assert code_digest(["json.decoder", "acme_plugin.model"], ["acme_plugin"]) == ""
    assert code_digest([]) == ""


def test_script_is_read_by_its_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    script = write("script.py", "1")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script)))
    before = code_digest(["__main__"])
    script.write_text("2")
    assert code_digest(["__main__"]) != before
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())
    with pytest.raises(UnknownCodeError, match="'__main__' is in no file"):
        code_digest(["__main__"])


def test_code_that_may_not_be_what_was_loaded_is_unknown(write: Write) -> None:
    with pytest.raises(UnknownCodeError, match=r"'acme_missing\.model' is in no file"):
        code_digest(["acme_missing.model"])
    began_ns = process_start_ns()
    assert began_ns is not None
    with pytest.raises(UnknownCodeError, match="changed after this process began"):
        code_digest(["acme_plugin"], since_ns=began_ns)
    assert code_digest(["acme_plugin"], since_ns=time.time_ns() + 10**10)
