"""Identify the LoRA adapter that a request is computed with, by all bytes of its files.

vLLM's keys hold an adapter's name and path. Keys of kvtier's hold the digest of its files instead,
so that another adapter of that name never matches, and this one does under any name, also after a
restart. Until the digest is known, or if it never is, keys stay vLLM's, and are good for this
process only.

vLLM reads an adapter's files whenever it likes: at a load, at its first request, and again after it
has dropped the adapter from memory. So their stamps are noted before the first of these, and
compared whenever KV is looked up or stored: in between vLLM can only have read the same files.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from blake3 import blake3

from kvtier.connectors.common.weights import find_files
from kvtier.connectors.vllm.shared import weights
from kvtier.connectors.vllm.shared.cores import off_compute_cores
from kvtier.connectors.vllm.shared.grid import grids_of
from kvtier.connectors.vllm.shared.key_scope import KeyScope, counts_media, scope_of
from kvtier.connectors.vllm.shared.new_weights import hook
from kvtier.identity import GRAIN_NS, Basis, Identification

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

SMALL_BYTES = 256 << 20
"""An adapter of up to this size is read at once, on the scheduler's thread, just before vLLM reads
the same files there."""


class AdapterLoad:
    """One load of an adapter, from before vLLM reads its files until another takes its number.

    Args:
        adapter: vLLM's description of it.
        num_before: loads before it under the same name and path.
    """

    def __init__(self, adapter: LoRARequest, num_before: int) -> None:
        self.name = _name(adapter)
        self.content = b""
        """Digest of its files and of how they are used; b"" while it is unknown."""
        self.salt = f"load {num_before}".encode() if num_before else b""
        """Distinguishes it from other loads of its name and path, in this process."""
        self._is_certain = True
        place = self._find()
        called = f"adapter {adapter.lora_name!r}"
        self._files = None if place is None else Identification([place], name=called)

    def _find(self) -> Path | None:
        """Return the files as vLLM finds them; None if they are not here."""
        return find_files(weights.vllm_source(os.path.expanduser(self.name[1])))

    def doubt(self) -> None:
        """Note that vLLM may compute with another adapter under this load's number."""
        self._is_certain = False

    def holds(self) -> bool:
        """Whether vLLM can have read only the files of this load."""
        if self._is_certain and self._files is not None:
            place = self._find()
            self._is_certain = place is not None and self._files.is_still([place])
        return self._is_certain

    def keeps(self, num_computed: int) -> bool:
        """Whether KV of a request may be kept.

        num_computed: tokens that vLLM has found in its own pool. It finds them by name and path, so
        they may be those of an earlier load.
        """
        return self.holds() and not (num_computed and self.salt)

    def read(self, traits: str) -> None:
        """Find ``content``, in the background if that takes a while.

        traits: what else decides on KV.
        """
        files = self._files
        if files is None:
            logger.info("adapter %r is in no local files: its KV stays in memory", self.name)
            return
        is_young = files.newest_ns > time.time_ns() - GRAIN_NS

        def read() -> None:
            found = files.read()
            if is_young:  # within the grain of time stamps a later change does not show
                time.sleep(GRAIN_NS / 1e9)
            if found.basis is Basis.READ and (not is_young or files.read() == found):
                self.content = blake3(f"{traits} {found.digest}".encode()).digest()

        with off_compute_cores():
            if not is_young and files.num_bytes <= SMALL_BYTES:
                read()
            else:
                Thread(target=read, name="kvtier-adapter", daemon=True).start()


def _name(adapter: LoRARequest) -> tuple[str, str]:
    return adapter.lora_name, adapter.lora_path


class Adapters:
    """Adapters of one scheduler, on its thread.

    Args:
        reads_files: KV goes to storage, so adapters have to be known by their content.
        traits: what decides on their KV beside their files.
        counts_media: whether vLLM names media by a counter.
        grid: tokens in a cell of prompts; 0 without a grid.
        rename: return a request with other keys, if KV of its keys is in quarantine.
    """

    def __init__(
        self,
        reads_files: bool = False,
        traits: str = "",
        counts_media: bool = False,
        grid: int = 0,
        rename: Callable[[Any, KeyScope], Any] = lambda request, scope: request,
    ) -> None:
        self._reads_files = reads_files
        self._traits = traits
        self._counts_media = counts_media
        self._grid = grid
        self._rename = rename
        self._loads: dict[int, AdapterLoad] = {}
        self._num_loads: Counter[tuple[str, str]] = Counter()

    def before_load(self, adapter: LoRARequest) -> None:
        """Note that vLLM is about to load an adapter, unless it has it already."""
        if adapter.load_inplace:
            self.after_removal(adapter.lora_int_id)
        self.load_of(adapter)

    def after_removal(self, number: int) -> None:
        """Note that vLLM gave up the adapter of a number."""
        load = self._loads.pop(number, None)
        if load is not None:
            load.doubt()

    def load_of(self, adapter: LoRARequest) -> AdapterLoad:
        """Return the load that a request is computed with."""
        load, name = self._loads.get(adapter.lora_int_id), _name(adapter)
        if load is None:
            load = self._loads[adapter.lora_int_id] = AdapterLoad(adapter, self._num_loads[name])
            self._num_loads[name] += 1
            if self._reads_files and getattr(adapter, "tensorizer_config_dict", None) is None:
                is_3d = getattr(adapter, "is_3d_lora_weight", False)
                load.read(f"{self._traits} {is_3d}")
        elif load.name != name:
            # vLLM may compute with either, and does so under this name, too.
            load.doubt()
            self._num_loads[name] += 1
        return load

    def begin(self, request: Request) -> tuple[Any, KeyScope]:
        """Return a new request of vLLM's with the keys to use, and their scope."""
        if request.lora_request is None:
            scope = scope_of(request, self._counts_media, grid=self._grid)
            return self._rename(request, scope), scope
        load = self.load_of(request.lora_request)
        ours, names_adapter = keyed(request, load)
        scope = scope_of(request, self._counts_media, names_adapter, self._grid)
        scope.adapter = load
        return self._rename(ours, scope), scope


def adapters_of(
    config: VllmConfig, has_storage: bool, rename: Callable[[Any, KeyScope], Any]
) -> Adapters:
    """Return the adapters of this process's scheduler, hooked into its engine core."""
    (grid,) = grids_of(config.kv_transfer_config.kv_connector_extra_config)
    if config.lora_config is None:
        return Adapters(counts_media=counts_media(config), grid=grid, rename=rename)
    traits, counted = weights.adapter_traits(config), counts_media(config)
    made = Adapters(has_storage, traits, counted, grid, rename)
    watch(made)
    return made


def keyed(request: Request, load: AdapterLoad) -> tuple[Any, bool]:
    """Return a request with keys of its adapter's, and whether they name the adapter's content."""
    if load.content:
        return RekeyedRequest(request, load.content, names_adapter=False), True
    return (RekeyedRequest(request, load.salt) if load.salt else request), False


class RekeyedRequest:
    """A request of vLLM's whose block hashes are its own: vLLM's, hashed with a salt.

    names_adapter: vLLM's hashes hold the adapter's name and path; else they are made without.
    """

    def __init__(self, request: Request, salt: bytes, names_adapter: bool = True) -> None:
        self._request = request
        self._salt = salt
        self._hashes: list[bytes] = []
        self._unadapted = None if names_adapter else _Unadapted(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """vLLM's block hashes so far, each hashed again with the salt."""
        theirs: Sequence[bytes] = self._request.block_hashes
        if len(theirs) > len(self._hashes):
            if self._unadapted is not None:
                theirs = self._unadapted.hash()
            for their in theirs[len(self._hashes) :]:
                self._hashes.append(blake3(self._salt + their).digest(len(their)))
        return self._hashes


class _Unadapted:
    """A request of vLLM's as it is hashed where it has no adapter."""

    lora_request = None

    def __init__(self, request: Request) -> None:
        self._request = request
        self.block_hashes: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def hash(self) -> list[bytes]:
        self.block_hashes += self._request._block_hasher(self)
        return self.block_hashes


WATCHING: WeakSet[Adapters] = WeakSet()


def watch(adapters: Adapters) -> None:
    """Hook the engine core of this process; ``adapters`` learns of each load before it begins."""
    from vllm.v1.engine.core import EngineCore

    WATCHING.add(adapters)
    if not hasattr(EngineCore.add_lora, "__wrapped__"):
        hook(EngineCore, "add_lora", _add, 1)
        hook(EngineCore, "remove_lora", _remove, 1)


def _add(core: EngineCore, adapter: LoRARequest, call: Callable[[], Any]) -> Any:
    for adapters in list(WATCHING):
        adapters.before_load(adapter)
    return call()


def _remove(core: EngineCore, number: int, call: Callable[[], Any]) -> Any:
    try:
        return call()
    finally:
        for adapters in list(WATCHING):
            adapters.after_removal(number)
