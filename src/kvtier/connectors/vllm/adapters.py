"""Identify the load of a LoRA adapter that a request is computed with.

vLLM's keys hold an adapter's name and path. An adapter that was loaded again under both is another
one: its requests get keys of their own. vLLM's scheduler is not told of loads, so they are seen by
an adapter's number (vLLM's server gives a new one to each load but those in place), by
``load_inplace`` and by its files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kvtier.identity.files import Files, model_files

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Load:
    """One load of an adapter.

    number: of loads under the same name and path.

    files: how they looked at its first request. is_certain: the adapter in memory is still the one
    that was loaded first.
    """

    number: int
    files: Files
    is_certain: bool = True


class Adapters:
    """Adapters of one scheduler, on its thread."""

    def __init__(self) -> None:
        self._loads: dict[tuple[str, str], dict[int, _Load]] = {}

    def load_of(self, adapter: LoRARequest) -> bytes | None:
        """Return what distinguishes the keys of this load from those of others.

        b"" for the first load of a name and path; None if the load is unknown.

        With ``load_inplace`` vLLM reads the files anew whenever it likes. Files that have changed
        since the first request may have been loaded since, or not.
        """
        loads = self._loads.setdefault((adapter.lora_name, adapter.lora_path), {})
        files = _files(adapter.lora_path)
        load = loads.get(adapter.lora_int_id)
        if load is None:
            load = loads[adapter.lora_int_id] = _Load(len(loads), files)
        if adapter.load_inplace or load.files != files:
            load.is_certain = False
        if not load.is_certain:
            return None
        return f"load {load.number}".encode() if load.number else b""


def _files(path: str) -> Files:
    """Nothing of an adapter that lies elsewhere, such as on a hub."""
    try:
        return model_files(Path(path))
    except OSError:
        return {}


class RekeyedRequest:
    """A request of vLLM's whose block hashes are its own: vLLM's, hashed with a salt."""

    def __init__(self, request: Request, salt: bytes) -> None:
        self._request = request
        self._salt = salt
        self._hashes: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """As many as vLLM has so far."""
        for each in self._request.block_hashes[len(self._hashes) :]:
            self._hashes.append(blake3(self._salt + each).digest(len(each)))
        return self._hashes
