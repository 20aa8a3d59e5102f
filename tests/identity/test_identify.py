"""Weights are known by all their bytes, and by the time at which they were read."""

from __future__ import annotations

import os
import shutil
import struct
import time
from pathlib import Path
from queue import Queue
from threading import Event

import pytest

from kvtier.identity import Basis, Identification, Identity, WeightsMemory, process_start_ns
from kvtier.identity.content import PART_BYTES, hash_files
from kvtier.identity.files import GRAIN_NS, Stamp, telling

LONG_AGO_NS = 1_600_000_000 * 10**9
SIZE = 3 << 20
"""Above what is read each time."""


@pytest.fixture
def memory(tmp_path: Path) -> WeightsMemory:
    return WeightsMemory(tmp_path / "cache" / "weights")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two shards, of different times."""
    return make(tmp_path / "model")


def make(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"rope_scaling": null}')
    (path / "tokenizer.json").write_text("{}")
    for at in range(2):
        (path / f"model-{at}.safetensors").write_bytes(bytes([at + 1]) * SIZE)
    age(path)
    return path


def age(path: Path) -> None:
    for at, file in enumerate(sorted(path.iterdir())):
        os.utime(file, ns=(LONG_AGO_NS, LONG_AGO_NS + at * 10**9 + 1))


def overwrite(file: Path, at: int, content: bytes) -> None:
    """In place, with size and mtime as they were."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Stamp.of(file.stat()).size == before.st_size
    assert file.stat().st_mtime_ns == before.st_mtime_ns


def look(*models: Path, memory: WeightsMemory | None = None, **settings: int) -> Identity:
    """As an engine does at a start; every model counts as large."""
    weights = Identification(models, memory, **{"small_bytes": 0, **settings})  # type: ignore[arg-type]
    weights.begin()
    found = weights.settle()
    weights.stop()
    return found


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on: what was written a moment ago is older than a file system's grain."""
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 2 * GRAIN_NS)


# -- what counts -----------------------------------------------------------------------------------


def test_equal_files_are_equal_models_wherever_they_lie(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "other name")
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert look(folder) == look(copy) == look(link)
    assert look(folder).basis is Basis.READ


@pytest.mark.parametrize("at", [0, 100, (1 << 20) + 5, SIZE - 1])
def test_any_byte_counts_with_size_and_times_kept(folder: Path, at: int) -> None:
    before = look(folder)
    overwrite(folder / "model-1.safetensors", at, b"x")
    assert look(folder) != before


def test_tensors_that_changed_places_are_another_model(tmp_path: Path) -> None:
    """The header's offsets say which bytes are whose."""
    found = []
    for at, offsets in enumerate(((0, 8), (8, 0))):
        parts = [
            f'"{name}":{{"dtype":"F32","shape":[2],"data_offsets":[{start},{start + 8}]}}'
            for name, start in zip(("k", "v"), offsets, strict=True)
        ]
        header = ("{" + ",".join(parts) + "}").encode()
        path = tmp_path / str(at) / "model"
        path.mkdir(parents=True)
        content = struct.pack("<Q", len(header)) + header + b"a" * 8 + b"b" * 8
        (path / "model.safetensors").write_bytes(content)
        found.append(look(path))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors.index.json", "quantize_config.json", "params.json", "m.py"],
)
def test_what_says_how_weights_are_computed_with_counts(folder: Path, name: str) -> None:
    before = look(folder)
    (folder / name).write_text('{"rope_scaling": {"type": "yarn"}}')
    assert look(folder) != before


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", "generation_config.json"])
def test_what_says_nothing_of_kv_may_change(folder: Path, name: str) -> None:
    before = look(folder)
    (folder / name).write_text("new")
    assert look(folder) == before


def test_shards_that_swapped_names_are_another_model(folder: Path) -> None:
    before = look(folder)
    one, two = folder / "model-0.safetensors", folder / "model-1.safetensors"
    one.rename(folder / "aside")
    two.rename(one)
    (folder / "aside").rename(two)
    assert look(folder) != before


def test_models_that_are_used_together_count_in_their_order(folder: Path, tmp_path: Path) -> None:
    draft = make(tmp_path / "draft")
    (draft / "config.json").write_text("{}")
    assert len({look(folder).digest, look(folder, draft).digest, look(draft, folder).digest}) == 3


def test_links_to_nowhere_and_what_is_no_file_harm_nobody(folder: Path) -> None:
    before = look(folder)
    os.mkfifo(folder / "pipe.bin")
    (folder / "dir.bin").mkdir()
    assert look(folder) == before
    (folder / "absent.bin").symlink_to(folder / "nowhere")
    assert look(folder) != before
    assert look(folder).basis is Basis.READ


def test_one_file_may_be_the_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    before = look(file)
    file.write_bytes(b"two")
    assert before.basis is Basis.READ
    assert look(file) != before


def test_digest_does_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as opened:
        opened.truncate(2 * PART_BYTES + 3)
    empty = tmp_path / "empty"
    empty.touch()
    digests = [hash_files([file, empty], threads, Event()) for threads in (1, 2, 5)]
    assert digests[0] == digests[1] == digests[2]
    with file.open("r+b") as opened:
        opened.seek(PART_BYTES + 7)
        opened.write(b"x")
    assert hash_files([file, empty], 2, Event())[0] != digests[0][0]


# -- nobody can say -------------------------------------------------------------------------------


def test_files_that_changed_while_they_were_loaded_have_no_name(folder: Path) -> None:
    found = []
    for byte in (b"x", b"y"):
        weights = Identification([folder], small_bytes=0)
        weights.begin()
        overwrite(folder / "model-0.safetensors", 5, byte)
        found.append(weights.settle())
    assert {each.basis for each in found} == {Basis.UNKNOWN}
    assert found[0].digest != found[1].digest, "nor the same one twice"


def test_files_that_changed_before_all_was_read_have_no_name(folder: Path) -> None:
    weights = Identification([folder])
    overwrite(folder / "model-0.safetensors", 5, b"x")
    assert weights.read().basis is Basis.UNKNOWN


def test_remembered_files_that_changed_while_they_were_loaded_have_no_name(
    folder: Path, memory: WeightsMemory, later: None
) -> None:
    look(folder, memory=memory)
    weights = Identification([folder], memory, small_bytes=0)
    weights.begin()
    overwrite(folder / "model-0.safetensors", 5, b"x")
    assert weights.settle().basis is Basis.UNKNOWN


def test_files_that_changed_after_the_loading_may_have_begun_have_no_name(folder: Path) -> None:
    changed_ns = max(Stamp.of(file.stat()).changed_ns for file in folder.iterdir())
    assert look(folder, since_ns=changed_ns - 1).basis is Basis.UNKNOWN
    assert look(folder, since_ns=changed_ns).basis is Basis.READ


def test_files_that_cannot_be_read_have_no_name(folder: Path, tmp_path: Path) -> None:
    assert look(tmp_path / "absent").basis is Basis.UNKNOWN
    weights = Identification([folder], small_bytes=0)
    (folder / "model-0.safetensors").unlink()
    weights.begin()
    assert weights.settle().basis is Basis.UNKNOWN


def test_process_knows_when_it_began() -> None:
    began_ns = process_start_ns()
    assert began_ns is not None
    assert time.time_ns() - 24 * 3600 * 10**9 < began_ns < time.time_ns()


# -- what is remembered ----------------------------------------------------------------------------


def test_files_that_look_as_they_did_are_not_read_again(
    folder: Path, memory: WeightsMemory, later: None
) -> None:
    first = look(folder, memory=memory)
    second = look(folder, memory=memory)
    assert (first.basis, second.basis) == (Basis.READ, Basis.REMEMBERED)
    assert first.digest == second.digest


def test_small_model_is_read_each_time(folder: Path, memory: WeightsMemory, later: None) -> None:
    for _ in range(2):
        assert look(folder, memory=memory, small_bytes=1 << 30).basis is Basis.READ


def test_configuration_is_read_also_where_weights_are_remembered(
    folder: Path, memory: WeightsMemory, later: None
) -> None:
    first = look(folder, memory=memory)
    (folder / "config.json").write_text('{"rope_scaling": {"factor": 4}}')
    second = look(folder, memory=memory)
    assert second.basis is Basis.REMEMBERED
    assert second.digest != first.digest


def test_replacement_in_place_is_seen_by_the_time_that_nobody_can_set(
    folder: Path, memory: WeightsMemory, later: None
) -> None:
    first = look(folder, memory=memory)
    overwrite(folder / "model-0.safetensors", 2 << 20, b"other weights")
    second = look(folder, memory=memory)
    assert second.basis is Basis.READ
    assert second.digest != first.digest


def test_file_that_took_anothers_place_is_read(
    folder: Path, memory: WeightsMemory, later: None
) -> None:
    look(folder, memory=memory)
    file = folder / "model-0.safetensors"
    before = file.stat()
    new = folder / "new"
    new.write_bytes(b"n" * SIZE)
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.replace(file)
    assert look(folder, memory=memory).basis is Basis.READ


def test_files_that_changed_a_moment_ago_are_not_remembered(
    folder: Path, memory: WeightsMemory
) -> None:
    for _ in range(2):
        assert look(folder, memory=memory).basis is Basis.READ


NOW_NS = 1_800_000_000 * 10**9


@pytest.mark.parametrize("mtime_ns", [0, 10**9, 315_532_800 * 10**9, NOW_NS + 60 * 10**9])
def test_times_that_were_made_up_or_lie_ahead_tell_nothing(mtime_ns: int) -> None:
    stamps = {"a": Stamp(1, mtime_ns, LONG_AGO_NS, 1), "b": Stamp(1, LONG_AGO_NS + 1, 1, 2)}
    assert telling(stamps, NOW_NS) == {"b"}


def test_one_time_for_all_files_tells_nothing_unless_a_clock_gave_it() -> None:
    def stamps(time_ns: int) -> dict[str, Stamp]:
        return {name: Stamp(1, time_ns, LONG_AGO_NS, 1) for name in "ab"}

    assert telling(stamps(LONG_AGO_NS), NOW_NS) == set()
    assert telling(stamps(LONG_AGO_NS + 5), NOW_NS) == {"a", "b"}


def test_change_within_the_grain_of_a_file_system_is_not_seen_by_its_time() -> None:
    young, old = NOW_NS - GRAIN_NS + 1, NOW_NS - GRAIN_NS
    for stamp, expected in (
        (Stamp(1, young, LONG_AGO_NS, 1), set()),
        (Stamp(1, LONG_AGO_NS, young, 1), set()),
        (Stamp(1, old, old, 1), {"a"}),
    ):
        assert telling({"a": stamp}, NOW_NS) == expected


# -- what was remembered is checked ----------------------------------------------------------------


def _check(folder: Path, memory: WeightsMemory) -> tuple[Identity, Identity]:
    weights = Identification([folder], memory, small_bytes=0)
    weights.begin()
    known = weights.settle()
    heard: Queue[Identity] = Queue()
    weights.check(heard.put)
    found = heard.get(timeout=60)
    weights.stop()
    return known, found


def test_check_confirms_what_was_remembered(
    folder: Path, memory: WeightsMemory, later: None
) -> None:
    look(folder, memory=memory)
    known, found = _check(folder, memory)
    assert (known.basis, found.basis) == (Basis.REMEMBERED, Basis.READ)
    assert known.digest == found.digest


def lie(memory: WeightsMemory, folder: Path) -> None:
    """The files look as remembered, and hold something else."""
    weights = Identification([folder], memory, small_bytes=0)
    stamps = {str(path): stamp for path, stamp in weights._large().items()}
    memory.remember(weights._key, {path: (stamp, "00" * 32) for path, stamp in stamps.items()})


def test_check_finds_what_is_remembered_wrongly_and_forgets_it(
    folder: Path, memory: WeightsMemory, later: None
) -> None:
    right = look(folder)
    lie(memory, folder)
    known, found = _check(folder, memory)
    assert known.basis is Basis.REMEMBERED
    assert known.digest != right.digest
    assert found.basis is Basis.UNKNOWN, "nobody knows who was loaded"
    again = look(folder, memory=memory)
    assert (again.basis, again.digest) == (Basis.READ, right.digest)


def test_nobody_hears_of_a_check_that_was_stopped(
    folder: Path, memory: WeightsMemory, later: None
) -> None:
    look(folder, memory=memory)
    weights = Identification([folder], memory, small_bytes=0)
    weights.begin()
    weights.settle()
    weights._stop.set()
    heard: list[Identity] = []
    weights.check(heard.append)
    weights.stop()
    assert heard == []
