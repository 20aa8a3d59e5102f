"""Versions outside the tested range are warned about once, by attach, serve and doctor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier
from kvtier.connectors.transformers import versions
from kvtier.serve.engine import Engine
from kvtier.tools.cli import detect
from tests.connectors.transformers.models import small_model
from tests.serve.engine.conftest import SMALL

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]
SENTENCE = "kvtier was tested with transformers 5.20 to 5.24, not with 5.99.1:"


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let transformers be of a version that no test ran with."""
    found = {"torch": "2.13.1+cpu", "transformers": "5.99.1"}
    monkeypatch.setattr(versions, "version", found.__getitem__)
    versions.warn_of_untested.cache_clear()
    yield
    versions.warn_of_untested.cache_clear()


def test_the_versions_that_are_installed_by_the_makefile_are_tested_ones() -> None:
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert all(known.covers(pins[name]) for name, known in versions.TESTED.items())
    known = versions.TESTED["transformers"]
    major, minor = known.newest.split(".")
    requirement = f'"transformers>={known.oldest},<{major}.{int(minor) + 1}"'
    assert requirement in (ROOT / "pyproject.toml").read_text()


@pytest.mark.usefixtures("newer")
def test_an_untested_version_is_one_warning_in_a_process(caplog: pytest.LogCaptureFixture) -> None:
    kvtier.attach(small_model(), host_capacity="1MiB").detach()
    Engine(SMALL).close()
    found = [record for record in caplog.records if "was tested with" in record.getMessage()]
    assert [record.levelname for record in found] == ["WARNING"]
    assert found[0].getMessage().startswith(SENTENCE)


@pytest.mark.usefixtures("newer")
def test_doctor_names_an_untested_version() -> None:
    notes = {finding.topic: finding.note for finding in detect.packages()}
    assert notes["transformers"].startswith(SENTENCE)
    assert not notes["torch"]
