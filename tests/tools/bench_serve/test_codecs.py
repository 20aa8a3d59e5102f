"""``kvtier bench codec``: codecs on a model's own KV."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvtier.core.errors import ConfigError
from kvtier.tools.bench_serve.codecs import divergence, read_prompts
from kvtier.tools.cli import app


def test_divergence_is_zero_for_equal_logits_only() -> None:
    logits = np.array([[0, 1, 2], [3, 0, 0]], np.float32)
    assert divergence(logits, logits).tolist() == [0, 0]
    assert divergence(logits, logits + 5).max() < 1e-9, "a constant changes no distribution"
    uniform, sure = np.zeros((1, 2), np.float32), np.log(np.array([[1, 3]], np.float32))
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert divergence(uniform, sure) == pytest.approx(expected, rel=1e-5)


def test_prompts_are_read(tmp_path: Path) -> None:
    text, lines = tmp_path / "some.txt", tmp_path / "some.jsonl"
    text.write_text("one\n\ntwo\n")
    lines.write_text('{"prompt": "one\\ntwo"}\n')
    assert read_prompts(text) == ["one", "two"]
    assert read_prompts(lines) == ["one\ntwo"]
    for wrong in ('{"text": "one"}', "one", "[1]", '{"prompt": 1}'):
        lines.write_text(wrong)
        with pytest.raises(ConfigError, match="prompt"):
            read_prompts(lines)
    text.write_text("\n")
    with pytest.raises(ConfigError, match="no prompt"):
        read_prompts(text)


def test_command_measures_the_users_own_prompts(tmp_path: Path) -> None:
    prompts, result = tmp_path / "prompts.txt", tmp_path / "result.json"
    prompts.write_text(f"{'The cat sat on the mat. ' * 12}\nshort\n")
    words = ["bench", "codec", "random-mla", "--prompts", str(prompts), "--block-size", "16"]
    done = CliRunner().invoke(
        app, [*words, "--device", "cpu", "--answer-tokens", "4", "--json", str(result)]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(result.read_text())
    assert (found["num_prompts"], found["num_skipped"]) == (1, 1)
    rows = {row["codec"]: row for row in found["rows"]}
    for name in ("fp8", "int8"):
        row = rows[name]
        assert row["ratio"] == pytest.approx(4 * 16 / (16 + 2))
        assert not row["keeps_bits"]
        assert 0 < row["kl_mean"] <= row["kl_p99"] <= row["kl_max"]
        assert row["encode_gb_per_s"] > 0
    assert rows["fp8"]["kl_mean"] > rows["int8"]["kl_mean"]
    if "lossless" in rows:
        assert rows["lossless"]["keeps_bits"]
        assert rows["lossless"]["kl_max"] == 0


def test_too_short_prompts_are_one_sentence(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("short\n")
    done = CliRunner().invoke(
        app, ["bench", "codec", "random-gqa", "--device", "cpu", "--prompts", str(prompts)]
    )
    assert isinstance(done.exception, ConfigError | SystemExit)
    assert "more than a block" in f"{done.output} {done.exception}"
