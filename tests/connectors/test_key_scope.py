"""Keys of vLLM that name content, and the adapter load that they mean."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvtier.connectors.vllm.adapters import Adapters, RekeyedRequest
from kvtier.connectors.vllm.key_scope import ALL, EVERYWHERE, KeyScope, counts_media, scope_of


def request(**changes: object) -> Any:
    """A request for text, but for these changes."""
    plain = {"lora_request": None, "prompt_embeds": None, "mm_features": [], "resumable": False}
    return SimpleNamespace(**{**plain, **changes})


def media(*offsets: int) -> list[Any]:
    """Images, audio or video, at these places of a prompt."""
    return [SimpleNamespace(mm_position=SimpleNamespace(offset=each)) for each in offsets]


def config(prefix_caching: bool, processor_gb: float | None) -> Any:
    """vLLM's. processor_gb: None for a model of text alone."""
    multimodal = None
    if processor_gb is not None:
        multimodal = SimpleNamespace(
            mm_processor_cache_gb=processor_gb, language_model_only=False, enable_mm_embeds=False
        )
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )


def test_text_goes_everywhere() -> None:
    assert scope_of(request(), counts_media=True) == EVERYWHERE


def test_blocks_from_the_first_media_on_stay_in_this_process() -> None:
    seen = request(mm_features=media(700, 130))
    assert scope_of(seen, counts_media=False) == KeyScope(shared=130)


def test_media_that_are_counted_are_not_kept() -> None:
    seen = request(mm_features=media(130))
    assert scope_of(seen, counts_media=True) == KeyScope(130, 130)


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


def test_an_adapter_that_may_be_another_is_not_kept() -> None:
    adapted = request(lora_request="adapter", mm_features=media(130))
    assert scope_of(adapted, counts_media=False, keeps_adapter=False) == KeyScope(0, 0)
    assert scope_of(adapted, counts_media=False) == KeyScope(0, ALL)


def adapter(path: Path, number: int = 1, load_inplace: bool = False) -> Any:
    return SimpleNamespace(
        lora_name="adapter", lora_path=str(path), lora_int_id=number, load_inplace=load_inplace
    )


def adapter_in(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"first")
    return folder


def test_each_load_of_an_adapter_has_keys_of_its_own(tmp_path: Path) -> None:
    folder, adapters = adapter_in(tmp_path / "one"), Adapters()
    first = adapters.load_of(adapter(folder))
    assert first == b"", "vLLM's own keys"
    assert adapters.load_of(adapter(folder)) == first
    second = adapters.load_of(adapter(folder, 2))
    assert second not in (None, first)
    assert adapters.load_of(adapter(folder)) == first, "another server's number for it"


def test_after_a_load_in_place_nobody_knows_which_adapter_it_is(tmp_path: Path) -> None:
    folder, adapters = adapter_in(tmp_path / "one"), Adapters()
    assert adapters.load_of(adapter(folder)) is not None
    assert adapters.load_of(adapter(folder, load_inplace=True)) is None
    assert adapters.load_of(adapter(folder)) is None, "the one that was loaded in place"
    assert adapters.load_of(adapter(folder, 2)) is not None


def test_changed_files_may_have_been_loaded_again(tmp_path: Path) -> None:
    folder, adapters = adapter_in(tmp_path / "one"), Adapters()
    assert adapters.load_of(adapter(folder)) is not None
    file = folder / "adapter_model.safetensors"
    before = file.stat()
    file.write_bytes(b"other")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns - 1))
    assert adapters.load_of(adapter(folder)) is None
    assert adapters.load_of(adapter(folder, 2)) is not None


def test_an_adapter_on_a_hub_is_known_by_its_number() -> None:
    adapters = Adapters()
    elsewhere = Path("no-such-organisation/adapter")
    assert adapters.load_of(adapter(elsewhere)) == b""
    assert adapters.load_of(adapter(elsewhere, 2)) == b"load 1"


def test_rekeyed_request_is_vllms_but_for_its_hashes() -> None:
    theirs = SimpleNamespace(request_id="one", block_hashes=[b"a" * 32])
    first, second = (RekeyedRequest(theirs, salt) for salt in (b"one", b"two"))
    assert first.request_id == "one"
    before = list(first.block_hashes)
    assert before not in (theirs.block_hashes, list(second.block_hashes))
    theirs.block_hashes.append(b"b" * 16)
    assert list(first.block_hashes)[:1] == before
    assert [len(each) for each in first.block_hashes] == [32, 16]
