"""Scope of vLLM's block keys that contain names instead of content, and loads of adapters."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from kvtier.connectors.vllm.shared.adapters import Adapters, RekeyedRequest, keyed
from kvtier.connectors.vllm.shared.key_scope import (
    ALL,
    KeyScope,
    counts_media,
    scope_of,
)
from kvtier.connectors.vllm.shared.prompt import RequestBlocks
from kvtier.connectors.vllm.shared.request_state import RequestState
from kvtier.identity import Identification


def request(**changes: object) -> Any:
    """Return a request for text, with these changes."""
    plain = {"lora_request": None, "prompt_embeds": None, "mm_features": [], "resumable": False}
    return SimpleNamespace(**{**plain, **changes})


def media(*offsets: int) -> list[Any]:
    """Return images, audio or video at these offsets of a prompt."""
    return [SimpleNamespace(mm_position=SimpleNamespace(offset=offset)) for offset in offsets]


def config(prefix_caching: bool, processor_gb: float | None) -> Any:
    """Return vLLM's configuration. processor_gb: None for a model of text only."""
    multimodal = None
    if processor_gb is not None:
        multimodal = SimpleNamespace(
            mm_processor_cache_gb=processor_gb, language_model_only=False, enable_mm_embeds=False
        )
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )


@pytest.mark.parametrize(
    ("asked", "counts", "scope"),
    [
        (request(), True, KeyScope()),
        (request(mm_features=media(700, 130)), False, KeyScope(shared=130)),
        (request(mm_features=media(130)), True, KeyScope(130, 130)),
    ],
    ids=["text", "blocks from the first media on stay in this process", "counted are not kept"],
)
def test_scope_ends_where_media_begin(asked: Any, counts: bool, scope: KeyScope) -> None:
    assert scope_of(asked, counts_media=counts) == scope


def test_media_are_counted_only_where_all_caches_are_off() -> None:
    assert counts_media(config(False, 0))
    assert not counts_media(config(True, 0))
    assert not counts_media(config(False, 4))
    assert not counts_media(config(False, None))


def test_names_of_any_other_kind_stay_in_this_process() -> None:
    for changes in ({"lora_request": "adapter"}, {"prompt_embeds": "tensor"}, {"resumable": True}):
        assert scope_of(request(**changes), counts_media=False) == KeyScope(shared=0), changes
        counted = request(**changes, mm_features=media(130))
        assert scope_of(counted, counts_media=True) == KeyScope(0, 130), changes


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, 896),
        ({"num_prompt_tokens": 127}, 0),
        ({"mm_features": media(700, 300)}, 256),
        ({"resumable": True}, 0),
    ],
    ids=["the prompt's whole cells", "none", "before the first media", "a session has pieces"],
)
def test_only_whole_cells_are_kept_on_a_grid(changes: dict[str, Any], end: int) -> None:
    asked = request(**{"num_prompt_tokens": 1000, **changes})
    assert scope_of(asked, counts_media=False, grid=128).kept == end


def test_adapter_that_keys_name_by_content_is_shared() -> None:
    adapted = request(lora_request="adapter", mm_features=media(130))
    assert scope_of(adapted, counts_media=False, names_adapter=True) == KeyScope(shared=130)
    assert scope_of(adapted, counts_media=False) == KeyScope(0, ALL)


def adapter(path: Path, number: int = 1, load_inplace: bool = False, name: str = "adapter") -> Any:
    return SimpleNamespace(
        lora_name=name, lora_path=str(path), lora_int_id=number, load_inplace=load_inplace
    )


def adapter_in(folder: Path, weights: bytes = b"first") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def no_grain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust the time stamps of files that were just written."""
    monkeypatch.setattr("kvtier.connectors.vllm.shared.adapters.GRAIN_NS", -(10**12))


def reading() -> Adapters:
    return Adapters(reads_files=True, traits="traits")


@pytest.mark.usefixtures("no_grain")
def test_content_is_the_same_under_any_name_and_another_for_other_bytes(tmp_path: Path) -> None:
    one, moved = adapter_in(tmp_path / "one"), adapter_in(tmp_path / "moved")
    other = adapter_in(tmp_path / "other", b"other")
    content = reading().load_of(adapter(one)).content
    assert len(content) == 32
    assert reading().load_of(adapter(moved, 7, name="renamed")).content == content
    assert reading().load_of(adapter(other)).content not in (b"", content)
    with_other_options = Adapters(reads_files=True, traits="others")
    assert with_other_options.load_of(adapter(one)).content not in (b"", content)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_files_that_were_just_written_are_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """A change within the resolution of time stamps, with the same size, does not show in them."""
    monkeypatch.setattr(Identification, "_is_as_it_was", lambda self: True)
    folder, adapters, waits = adapter_in(tmp_path / "one"), reading(), []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if is_replaced:
            adapter_in(folder, b"other")

    monkeypatch.setattr("kvtier.connectors.vllm.shared.adapters.time.sleep", wait)
    load = adapters.load_of(adapter(folder))
    for thread in threading.enumerate():
        if thread.name == "kvtier-adapter":
            thread.join(60)
    assert waits == [2.0]
    assert bool(load.content) != is_replaced


@pytest.mark.usefixtures("no_grain")
def test_adapter_is_known_only_where_it_goes_to_storage(tmp_path: Path) -> None:
    load = Adapters().load_of(adapter(adapter_in(tmp_path / "one")))
    assert load.content == b""
    assert load.holds()


def test_each_load_of_a_name_has_keys_of_its_own(tmp_path: Path) -> None:
    folder, adapters = adapter_in(tmp_path / "one"), Adapters()
    first = adapters.load_of(adapter(folder))
    assert first.salt == b"", "vLLM's own keys"
    assert adapters.load_of(adapter(folder)) is first
    second = adapters.load_of(adapter(folder, 2))
    assert second.salt != first.salt
    assert adapters.load_of(adapter(folder)) is first, "another server's number for it"
    assert first.keeps(16)
    assert second.keeps(0)
    assert not second.keeps(16), "vLLM's own pool may have had it from the first load"


@pytest.mark.usefixtures("no_grain")
def test_load_in_place_begins_a_load_and_ends_the_one_before(tmp_path: Path) -> None:
    folder, adapters = adapter_in(tmp_path / "one"), reading()
    first = adapters.load_of(adapter(folder))
    adapter_in(folder, b"other")
    adapters.before_load(adapter(folder, load_inplace=True))
    second = adapters.load_of(adapter(folder, load_inplace=True))
    assert second.content not in (b"", first.content)
    assert second.holds()
    assert not first.holds(), "of requests that were begun before"
    assert adapters.load_of(adapter(folder)) is second


def test_load_of_what_is_loaded_already_changes_nothing(tmp_path: Path) -> None:
    folder, adapters = adapter_in(tmp_path / "one"), Adapters()
    adapters.before_load(adapter(folder))
    first = adapters.load_of(adapter(folder))
    adapters.before_load(adapter(folder))
    assert adapters.load_of(adapter(folder)) is first
    assert first.holds()


def test_number_of_two_adapters_is_that_of_neither(tmp_path: Path) -> None:
    one, two = adapter_in(tmp_path / "one"), adapter_in(tmp_path / "two")
    adapters = Adapters()
    load = adapters.load_of(adapter(one))
    assert not adapters.load_of(adapter(two)).holds()
    assert not load.holds()
    adapters.after_removal(1)
    again = adapters.load_of(adapter(two))
    assert again.holds()
    assert again.salt, "vLLM's own pool may have KV of the other adapter under this name"


@pytest.mark.parametrize("change", ["bytes", "time", "place", "gone"])
def test_changed_files_may_have_been_loaded_again(tmp_path: Path, change: str) -> None:
    folder, adapters = adapter_in(tmp_path / "one"), Adapters()
    path = tmp_path / "current"
    path.symlink_to(folder)
    load = adapters.load_of(adapter(path))
    assert load.holds()
    file = folder / "adapter_model.safetensors"
    match change:
        case "bytes":
            file.write_bytes(b"longer")
        case "time":
            os.utime(file, ns=(1, 1))
        case "place":
            path.unlink()
            path.symlink_to(adapter_in(tmp_path / "two"))
        case "gone":
            file.unlink()
    assert not load.holds()
    assert not adapters.load_of(adapter(path)).keeps(0)
    assert adapters.load_of(adapter(path, 2)).keeps(0)


def test_adapter_on_a_hub_is_known_by_its_number() -> None:
    adapters = reading()
    elsewhere = Path("no-such-organisation/adapter")
    first, second = (adapters.load_of(adapter(elsewhere, number)) for number in (1, 2))
    assert (first.salt, second.salt) == (b"", b"load 1")
    assert first.content == second.content == b""
    assert first.holds()


def hash_more(request: Any) -> list[bytes]:
    """Hash tokens as vLLM does: with the hash before them, and the adapter's name."""
    hashes = list(request.block_hashes)
    for token in request.tokens[len(hashes) :]:
        before = hashes[-1] if hashes else b""
        hashes.append(blake3(before + token + repr(request.lora_request).encode()).digest())
    return hashes[len(request.block_hashes) :]


def test_keys_hold_the_content_of_an_adapter_and_not_its_name(tmp_path: Path) -> None:
    keys = []
    for name, content in (("one", b"c"), ("two", b"c"), ("one", b"d")):
        load = Adapters().load_of(adapter(tmp_path))
        theirs = SimpleNamespace(
            lora_request=name, tokens=[b"1", b"2"], block_hashes=[], _block_hasher=hash_more
        )
        assert keyed(theirs, load)[0] is theirs, "vLLM's own keys until the content is known"
        load.content = content
        ours, is_shared = keyed(theirs, load)
        assert is_shared
        assert ours.lora_request == name, "it is the same request in all else"
        for _ in range(2):
            theirs.block_hashes += hash_more(theirs)
            assert len(ours.block_hashes) == len(theirs.block_hashes)
            theirs.tokens.append(b"3")
        keys.append(ours.block_hashes)
    assert keys[0] == keys[1]
    assert not set(keys[0]) & set(keys[2])


def test_rekeyed_request_is_vllms_but_for_its_hashes() -> None:
    theirs = SimpleNamespace(request_id="one", block_hashes=[b"a" * 32])
    first, second = (RekeyedRequest(theirs, salt) for salt in (b"one", b"two"))
    assert first.request_id == "one"
    before = list(first.block_hashes)
    assert before not in (theirs.block_hashes, list(second.block_hashes))
    theirs.block_hashes.append(b"b" * 16)
    assert list(first.block_hashes)[:1] == before
    assert [len(each) for each in first.block_hashes] == [32, 16]


def test_request_whose_adapter_was_replaced_keeps_nothing(tmp_path: Path) -> None:
    adapters = Adapters()
    load = adapters.load_of(adapter(adapter_in(tmp_path / "one")))
    state = RequestState(RequestBlocks("one", {b"key": 16}), KeyScope(adapter=load))
    state.begin_look_up(0)
    assert state.is_kept(b"key")
    assert state.scope.is_computed_right()
    adapters.after_removal(1)
    assert not state.scope.is_computed_right()
    assert not state.is_kept(b"key")
