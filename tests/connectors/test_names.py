"""Names of vLLM's blocks follow the bytes of the weights, wherever vLLM loads them from."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.common.weights import Source, identify
from kvtier.connectors.vllm.shared import weights
from kvtier.connectors.vllm.shared.names import VllmNames
from kvtier.connectors.vllm.shared.weights import vllm_source
from kvtier.identity import Basis, Identification, Identity

from .test_identity import FACTS

NEVER_STARTED_NS = 1 << 62


@pytest.fixture(autouse=True)
def _before_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the files of a test as older than its process."""
    monkeypatch.setattr(
        "kvtier.connectors.common.weights.process_start_ns", lambda: NEVER_STARTED_NS
    )
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"rope_theta": 1}')
    (path / "model.safetensors").write_bytes(b"w" * (3 << 20))
    return path


def digest(*sources: Source, traits: str = "", namespace: str = "") -> bytes:
    """Return the digest of a start of vLLM."""
    names = VllmNames(FACTS, 4096, "vllm 0.32", namespace)
    names.settle(sources, traits)
    found = names.digest
    names.close()
    return found


def overwrite(file: Path, at: int) -> None:
    """Overwrite a byte in place; keep the size, and set all times as in a reproducible image."""
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(b"x")
    os.utime(file, (0, 0))


def test_replacement_in_place_with_size_and_time_kept_is_another_model(folder: Path) -> None:
    for file in folder.iterdir():
        os.utime(file, (0, 0))
    source = vllm_source(str(folder))
    before = digest(source)
    assert len(before) == 32
    assert digest(source) == before
    overwrite(folder / "model.safetensors", 2 << 20)
    assert digest(source) != before


def test_copy_in_another_place_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert digest(vllm_source(str(copy))) == digest(vllm_source(str(folder)))


def test_link_that_was_moved_on_is_another_model(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"v" * (3 << 20))
    link = tmp_path / "current"
    link.symlink_to(folder)
    before = digest(vllm_source(str(link)))
    link.unlink()
    link.symlink_to(other)
    assert digest(vllm_source(str(link))) != before


def test_model_that_drafts_counts(folder: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(folder, tmp_path / "draft")
    alone, both = (
        digest(vllm_source(str(folder))),
        digest(vllm_source(str(folder)), vllm_source(str(draft))),
    )
    overwrite(draft / "model.safetensors", 5)
    assert len({alone, both, digest(vllm_source(str(folder)), vllm_source(str(draft)))}) == 3


def test_gguf_file_is_known_by_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    os.utime(file, (0, 0))
    before = digest(vllm_source(str(file), load_format="gguf"))
    overwrite(file, 1)
    assert digest(vllm_source(str(file), load_format="gguf")) != before


# -- names on the hub ------------------------------------------------------------------------------


def fetched(home: Path, commit: str, content: bytes, name: str = "models--org--model") -> None:
    """Make a repository like the hub's client: files are links to blobs, a branch is a commit."""
    repository = home / name
    for each in ("blobs", "refs", f"snapshots/{commit}"):
        (repository / each).mkdir(parents=True, exist_ok=True)
    blob = repository / "blobs" / f"of-{commit}"
    blob.write_bytes(content)
    link = repository / "snapshots" / commit / "model.safetensors"
    link.symlink_to(f"../../blobs/{blob.name}")
    (repository / "refs" / "main").write_text(commit)


def test_name_on_the_hub_is_known_by_what_was_fetched(tmp_path: Path) -> None:
    one, two = "1" * 40, "2" * 40
    fetched(tmp_path, one, b"one")
    newest = vllm_source("org/model", download_dir=str(tmp_path))
    first = digest(newest)
    fetched(tmp_path, two, b"two")
    second = digest(newest)
    assert first != second
    assert digest(vllm_source("org/model", one, str(tmp_path))) == first
    assert digest(vllm_source("org/model", two, str(tmp_path))) == second


@pytest.mark.parametrize("name", ["org/model:Q4_K_M", "org/model/model-Q4.gguf"])
def test_gguf_in_a_repository_is_known_by_the_repository(tmp_path: Path, name: str) -> None:
    fetched(tmp_path, "1" * 40, b"one")
    assert isinstance(identify([vllm_source(name, "", str(tmp_path), "gguf")]), Identification)


def test_what_was_fetched_at_this_very_start_is_known(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's client writes a file once; files in a user's folder may change at any time."""
    fetched(tmp_path, "1" * 40, b"one")
    monkeypatch.setattr("kvtier.connectors.common.weights.process_start_ns", lambda: 1)
    hub, local = (
        identify([source])
        for source in (
            vllm_source("org/model", download_dir=str(tmp_path)),
            vllm_source(str(folder)),
        )
    )
    assert isinstance(hub, Identification)
    assert isinstance(local, Identification)
    assert hub.read().basis is Basis.READ
    assert local.read().basis is Basis.UNKNOWN


# -- weights that are in no file -------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        vllm_source("org/absent"),
        vllm_source("no name at all"),
        vllm_source("s3://bucket/model"),
        vllm_source("s3://bucket/model", load_format="runai_streamer"),
        vllm_source("kvtier", load_format="dummy"),
        vllm_source("kvtier", load_format="tensorizer"),
        vllm_source("kvtier", load_format="somebody's plug-in"),
    ],
)
def test_weights_that_nobody_can_read_have_a_name_of_this_process_only(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvtier").mkdir()
    assert digest(source) != digest(source)
    named = digest(source, namespace="weights of May")
    assert named == digest(source, namespace="weights of May"), "the user vouches for them"
    assert named != digest(source, namespace="weights of June")
    assert named != digest(vllm_source("org/other"), namespace="weights of May")


def test_random_weights_of_a_real_models_shape_are_not_that_model(folder: Path) -> None:
    real, dummy = vllm_source(str(folder)), vllm_source(str(folder), load_format="dummy")
    assert digest(real, namespace="n") != digest(dummy, namespace="n")


def test_modelscopes_files_are_not_looked_for_in_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(tmp_path, "1" * 40, b"one")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert isinstance(identify([vllm_source("org/model", download_dir=str(tmp_path))]), Identity)


# -- while they are read ---------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Treat every model as large, and hold its reading until this event."""
    event = threading.Event()
    read: Callable[..., Identity] = Identification.read

    def wait(self: Identification, *arguments: int, **settings: bool) -> Identity:
        while not event.wait(0.01) and not self._stop.is_set():
            pass
        return read(self, *arguments, **settings)

    monkeypatch.setattr(Identification, "is_small", False)
    monkeypatch.setattr(Identification, "read", wait)
    return event


def test_large_weights_have_a_name_when_all_of_them_were_read(
    folder: Path, held: threading.Event
) -> None:
    names = VllmNames(FACTS, 4096, "vllm 0.32")
    names.settle([vllm_source(str(folder))])
    assert names.digest == b""
    held.set()
    assert names._weights is not None
    assert names._weights._reader is not None
    names._weights._reader.join(60)
    assert names.digest == digest_of_files(folder)
    names.close()


def test_nobody_waits_for_the_reading_at_the_end(folder: Path, held: threading.Event) -> None:
    names = VllmNames(FACTS, 4096, "vllm 0.32")
    names.settle([vllm_source(str(folder))])
    names.close()
    assert names.digest == b""
    assert not any(each.name == "kvtier-weights" for each in threading.enumerate())


def test_reset_cache_may_mean_other_weights_in_memory(folder: Path) -> None:
    names = VllmNames(FACTS, 4096, "vllm 0.32")
    names.settle([vllm_source(str(folder))])
    before = names.digest
    names.disown()
    once = names.digest
    names.disown()
    assert len({before, once, names.digest}) == 3


def test_reset_while_weights_are_read_leaves_them_without_a_name(
    folder: Path, held: threading.Event
) -> None:
    names = VllmNames(FACTS, 4096, "vllm 0.32")
    names.settle([vllm_source(str(folder))])
    assert names._weights is not None
    reader = names._weights._reader
    assert reader is not None
    names.disown()
    held.set()
    reader.join(60)
    assert names.digest
    assert names.digest != digest_of_files(folder)


def test_kv_with_scales_of_a_processes_first_prompt_has_names_of_its_own() -> None:
    """Up to 0.29, vLLM can compute the scales of quantized KV from the first prompt."""
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(calculate_kv_scales=True))
    found = []
    for _ in range(2):
        names = VllmNames(FACTS, 4096, "vllm 0.29", "a namespace vouches for weights alone")
        weights.settle(names, config)
        found.append(names.digest)
    assert len({b"", *found}) == 3


def digest_of_files(folder: Path) -> bytes:
    names = VllmNames(FACTS, 4096, "vllm 0.32")
    found = Identification([folder]).read()
    assert found.basis is Basis.READ
    names._found = found
    return names.digest
