"""Each extra of the project brings what its part of kvtier imports, and messages name the extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvtier.core.errors import install_command
from tests.docs.pages import ROOT

KEY = "encryption_key='command:printf %064d 1'"
CODING = "from kvtier.tiers.codecs.opening import *; check_coding(CodingConfig({}))"
COMMAND = "from kvtier.tools.cli import app; app({})"
ENGINE = """
try:
    from kvtier.tools.cli import app
    app(["bench", "serve", "--model", "none"])
finally:
    import importlib, pkgutil
    for package in ("kvtier/engine", "kvtier/server", "kvtier/tools/bench_serve"):
        for found in pkgutil.walk_packages(["src/" + package], package.replace("/", ".") + "."):
            importlib.import_module(found.name)
"""
USES = {
    "codecs": CODING.format("'lossless'"),
    "encryption": CODING.format(KEY),
    "events": "from kvtier.observe.publisher import *; Publisher(None, 'tcp://127.0.0.1:*')",
    "traces": "from kvtier.observe.traces import *; open_traces('1')",
    "s3": COMMAND.format(["remote", "check", "s3://a?endpoint=http://127.0.0.1:9"]),
    "node": COMMAND.format(["node", "run", "--host-capacity", "1"]),
    "replay": COMMAND.format(["replay", "none.zst"]),
    "engine": ENGINE,
}
"""Per extra a use of what it is for, which needs nothing else. It may fail for another reason."""


def run(extra: str, code: str) -> str:
    """Return the output of ``code``, where only ``extra`` is installed."""
    command = [sys.executable, "-m", "tests.docs.only_extra", extra, "-c", code]
    ended = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    return ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(each, marks=[pytest.mark.slow, pytest.mark.nightly])
        if each == "engine"
        else each
        for each in USES
    ],
)
def test_an_extra_is_enough_for_its_part_and_asked_for_without(extra: str) -> None:
    needed = " ".join(run("", USES[extra]).split())
    assert install_command(extra) in needed
    told = run(extra, USES[extra])
    assert "No module named" not in told
    assert "install" not in told
