"""``kvtier bench audit``: each fault is found in time and named, and none where there is none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kvtier.serve.engine import EngineConfig
from kvtier.tools.bench_serve.audit import FAULTS, AuditResult, Fault, FaultResult, run_fault
from kvtier.tools.cli import app

pytestmark = pytest.mark.engine

CONFIG = EngineConfig(
    model="random-gqa",
    block_size=16,
    chunk_tokens=32,
    device_capacity="8MiB",
    threads=1,
    audit=1.0,
)
CAUSES = {
    "none": "",
    "a block has another prompt's bytes": "KV of other tokens",
    "the last token of a block is missing": "1 of 32 tokens differ, and others of the same block",
    "blocks were copied before they were computed": "KV of other tokens",
    "attention was patched when KV was stored": "attention computes something else",
    "positions had another scale when KV was stored": "positions (RoPE) differ",
    "another adapter was in effect when KV was stored": "or of other weights or another adapter",
}


def named(fault: Fault) -> str:
    return f"{fault.name}, {fault.tier}"


@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_a_fault_is_found_and_named_and_its_kv_is_not_used_any_more(fault: Fault) -> None:
    found = run_fault(fault, CONFIG)
    assert found.is_right
    assert found.found == (fault.name != "none")
    assert CAUSES[fault.name] in found.line
    if found.found:
        assert f"tier={fault.tier}" in found.line
        assert "first_token=" in found.line


def test_without_audits_no_fault_is_found() -> None:
    """Negative control: the checksums of storage do not find them."""
    for fault in FAULTS[1:]:
        found = run_fault(fault, replace(CONFIG, audit=0.0))
        assert not found.found
        assert not found.is_right
        assert found.is_used_after


def test_a_result_is_right_only_if_every_fault_was_found_and_is_avoided() -> None:
    right = FaultResult("x", "host", 6.0, 3, found=True, line="", is_used_after=False)
    missed = replace(right, found=False, is_used_after=True)
    control = replace(missed, fault="none")
    assert right.is_right
    assert control.is_right
    assert not missed.is_right
    assert not replace(right, is_used_after=True).is_right
    assert not replace(control, found=True, is_used_after=False).is_right
    assert not AuditResult("m", 1.0, (right, missed)).is_right


def test_the_command_prints_a_table_and_its_exit_code_is_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.tools.bench_serve.audit.FAULTS", FAULTS[:1])
    done = CliRunner().invoke(app, ["bench", "audit", "random-gqa", "--json", "-"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["fault"], row["found"], row["is_used_after"]) == ("none", False, True)
    wrong = [replace(FAULTS[0], name="not there")]
    monkeypatch.setattr("kvtier.tools.bench_serve.audit.FAULTS", wrong)
    done = CliRunner().invoke(app, ["bench", "audit", "random-gqa"])
    assert done.exit_code == 1
    assert "not there" in done.stdout
