"""What separates the chunks of one vLLM from those of another."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.vllm.identity import chunk_key, model_fingerprint, namespace


def _config(model: str = "org/model") -> Any:
    """As vLLM's OffloadingConfig, without vLLM."""
    group = SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("l.0", "l.1"))
    return SimpleNamespace(
        groups=(group, SimpleNamespace(group_id=1, tokens_per_block=32, layer_names=("l.2",))),
        worker_kv_bytes_per_block=4096,
        model=SimpleNamespace(name=model, dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2),
        parallel=SimpleNamespace(
            rank=0,
            world_size=2,
            tp_size=2,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
        ),
        engine_id="engine 1",
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout="LBHNC",
    )


def _digest(config: Any, row_bytes: int = 16384, engine: str = "vllm 0.32", **more: str) -> bytes:
    return namespace(config, row_bytes, engine, **more).digest


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.name", "org/other"),
        ("model.dtype", "fp8"),
        ("cache.tokens_per_hash", 32),
        ("cache.blocks_per_chunk", 4),
        ("worker_kv_bytes_per_block", 8192),
        ("parallel.world_size", 4),
        ("parallel.tp_size", 1),
        ("parallel.pp_size", 2),
        ("parallel.pcp_size", 2),
        ("parallel.dcp_size", 2),
        ("replicated_layout", True),
        ("canonical_layout", True),
        ("kv_cache_layout", "NHD"),
        ("groups", ()),
    ],
)
def test_whatever_changes_the_bytes_of_a_chunk_changes_its_key(path: str, value: object) -> None:
    changed = deepcopy(_config())
    *where, name = path.split(".")
    part = changed
    for each in where:
        part = getattr(part, each)
    assert getattr(part, name) != value
    setattr(part, name, value)
    assert _digest(changed) != _digest(_config())


def test_rows_engines_revisions_and_salts_are_separate_too() -> None:
    digests = {
        _digest(_config()),
        _digest(_config(), row_bytes=32768),
        _digest(_config(), engine="vllm 0.33"),
        _digest(_config(), revision="quantized"),
        _digest(_config(), salt="tenant"),
    }
    assert len(digests) == 5


def test_names_of_layers_and_their_groups_count() -> None:
    renamed, regrouped = _config(), _config()
    renamed.groups[1].layer_names = ("l.9",)
    regrouped.groups[0].layer_names, regrouped.groups[1].layer_names = ("l.0",), ("l.1", "l.2")
    assert len({_digest(each) for each in (_config(), renamed, regrouped)}) == 3


def test_who_asks_and_where_does_not_count() -> None:
    other = _config()
    other.engine_id, other.parallel.rank, other.parallel.data_parallel_index = "engine 2", 1, 1
    assert _digest(other) == _digest(_config())


def test_key_of_a_chunk_depends_on_both_parts() -> None:
    digest, other = _digest(_config()), _digest(_config(), salt="x")
    keys = {chunk_key(d, k) for d in (digest, other) for k in (b"a" * 36, b"a" * 35 + b"b")}
    assert len(keys) == 4
    assert {len(each) for each in keys} == {32}


# -- the model's files -----------------------------------------------------------------------------


def _folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"rope_theta": 1}')
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def _stamp(file: Path, content: bytes) -> None:
    """Rewrite a file, at another time."""
    before = file.stat().st_mtime_ns if file.exists() else 0
    file.write_bytes(content)
    os.utime(file, ns=(before + 10**9, before + 10**9))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"WEIGHTS"),
        ("config.json", b'{"rope_theta": 2}'),
        ("second.safetensors", b""),
        ("modeling.py", b"pass"),
        ("hf_quant_config.json", b"{}"),
    ],
)
def test_other_weights_in_the_same_folder_are_another_model(
    tmp_path: Path, name: str, content: bytes
) -> None:
    folder = _folder(tmp_path / "model")
    before = model_fingerprint(str(folder))
    assert before == model_fingerprint(str(folder))
    _stamp(folder / name, content)
    assert model_fingerprint(str(folder)) != before


def test_files_that_say_nothing_of_the_kv_may_change(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model")
    before = model_fingerprint(str(folder))
    _stamp(folder / "README.md", b"new")
    _stamp(folder / "config.json", b'{"rope_theta": 1}')  # the same content, at another time
    assert model_fingerprint(str(folder)) == before


def test_link_that_was_moved_on_is_another_model(tmp_path: Path) -> None:
    one, two = _folder(tmp_path / "one"), _folder(tmp_path / "two")
    link = tmp_path / "current"
    link.symlink_to(one)
    before = namespace(_config(str(link)), 1, "e").model
    assert before == namespace(_config(str(one)), 1, "e").model
    link.unlink()
    link.symlink_to(two)
    assert namespace(_config(str(link)), 1, "e").model != before


def test_links_to_files_that_were_not_fetched_harm_nobody(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model")
    before = model_fingerprint(str(folder))
    (folder / "pytorch_model.bin").symlink_to(tmp_path / "nowhere")
    assert model_fingerprint(str(folder)) != before


def test_single_file_is_known_by_size_and_time(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    _stamp(file, b"one")
    before = model_fingerprint(str(file))
    _stamp(file, b"two")
    assert model_fingerprint(str(file)) != before


def test_name_on_a_hub_is_known_by_the_commit_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert model_fingerprint("org/model") == ""
    refs = tmp_path / "models--org--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("c0ffee\n")
    assert model_fingerprint("org/model") == "c0ffee"
