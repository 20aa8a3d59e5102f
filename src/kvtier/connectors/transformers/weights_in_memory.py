"""Identity of a model that is in memory: all bytes of its weights, its settings and its code.

Files can't tell what a model computes with: it may have been quantised, merged with an adapter or
trained since it was loaded.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from threading import Lock, Thread

import torch
from blake3 import blake3
from transformers import PreTrainedModel

from kvtier.connectors.transformers.model_state import (
    OWN_CODE,
    ModelState,
    is_composed,
    meaning,
    parts,
)
from kvtier.identity import Basis, Identity, unknown
from kvtier.system.process import num_cores

logger = logging.getLogger(__name__)

SMALL_MODEL_BYTES = 1 << 30
"""This many bytes are read at once, in a fraction of a second."""
PIECE_BYTES = 64 << 20
"""Bytes of a tensor that are read in one step, and copied first if a device has them."""
MAX_THREADS = 8
NUM_POLITE_THREADS = 2
"""Threads that read in the background, while the model may be in use."""


class _Unreadable(Exception):  # noqa: N818 - a reason, and no failure
    """The weights cannot be read; the message says why."""


class WeightsInMemory:
    """The identity of a loaded model, found again whenever the model has changed.

    Changes are noticed by ``ModelState.stamp``. Only the tensors that have changed are read again:
    none if an adapter was switched or scaled. A change in place through ``tensor.data`` of so few
    elements that no sample is among them is not noticed: call ``forget`` after it.

    Args:
        model: the model.
        small_bytes: up to this many bytes are read while a prompt waits; more in the background.
    """

    def __init__(self, model: PreTrainedModel, small_bytes: int = SMALL_MODEL_BYTES) -> None:
        self._model = model
        self._small_bytes = small_bytes
        self._lock = Lock()
        self._stamp = b""
        self._identity: Identity | None = None
        self._digests: dict[bytes, bytes] = {}  # of tensors, by their marks
        self._reader: Thread | None = None

    def current(self) -> Identity | None:
        """Return the identity of the model as it is now; None while it is being read."""
        with self._lock:
            return self._current()

    def _current(self) -> Identity | None:
        state = ModelState(self._model)
        if state.stamp == self._stamp and self._identity is not None:
            return self._identity
        if self._reader is not None and self._reader.is_alive():
            return None
        new = [name for name, mark in state.marks.items() if mark not in self._digests]
        flat = (part for name in new for part in parts(state.tensors[name]))
        if sum(part.numel() * part.itemsize for part in flat) <= self._small_bytes:
            self._read(state, min(MAX_THREADS, num_cores()))
            return self._identity
        self._reader = Thread(
            target=self._read,
            args=(state, NUM_POLITE_THREADS),
            name="kvtier-weights",
            daemon=True,
        )
        self._reader.start()
        return None

    def is_still(self, identity: Identity) -> bool:
        """Whether the model is known to be unchanged since it had this identity."""
        return self._identity == identity and ModelState(self._model).stamp == self._stamp

    def forget(self) -> None:
        """Read the whole model again before its next prompt."""
        with self._lock:
            self._identity = None
            self._digests = {}

    def wait(self) -> None:
        """Wait until the reading in the background has ended."""
        if self._reader is not None:
            self._reader.join()

    def _read(self, state: ModelState, threads: int) -> None:
        """Set the identity, if the model did not change meanwhile. Prompts wait otherwise."""
        try:
            digests, found = self._identify(state, threads)
        except (_Unreadable, RuntimeError) as reason:  # torch: no such view, or no memory for it
            digests, found = {}, unknown(f"the weights in memory can't be read: {reason}")
        if ModelState(self._model).stamp == state.stamp:
            self._stamp, self._identity, self._digests = state.stamp, found, digests

    def _identify(self, state: ModelState, threads: int) -> tuple[dict[bytes, bytes], Identity]:
        """Return the digests of all tensors by their marks, and the identity of it all."""
        if state.unreadable:
            raise _Unreadable(state.unreadable)
        hasher = blake3(state.settings)
        kinds: set[type] = {type(module) for module in self._model.modules()}
        kinds |= {type(tensor) for tensor in state.tensors.values() if is_composed(tensor)}
        for code in _code_of(kinds):
            hasher.update(code.encode())
        digests: dict[bytes, bytes] = {}
        for name, tensor in state.tensors.items():
            mark = state.marks[name]
            if mark not in digests:  # tied weights are read once
                digests[mark] = self._digests.get(mark) or _digest(tensor, threads)
            hasher.update(f"\n{name} ".encode() + digests[mark])
        return digests, Identity(hasher.hexdigest(), Basis.READ)


def _digest(tensor: torch.Tensor, threads: int) -> bytes:
    """Return the digest of all bytes of a tensor, and of their meaning."""
    told = meaning(tensor)
    if " at 0x" in told:
        raise _Unreadable(f"there is a {type(tensor).__name__} with settings that can't be read")
    hasher = blake3(told.encode(), max_threads=threads)
    for part in _readable_parts(tensor):
        hasher.update(f"\n{tuple(part.shape)} {part.dtype} ".encode())
        for piece in _pieces(part):
            hasher.update(piece.numpy().data)
    return hasher.digest()


def _readable_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of a parameter, which may be quantised."""
    for part in parts(tensor):
        if part.is_meta:
            raise _Unreadable("some are offloaded")
        yield part
    state = getattr(tensor, "quant_state", None)
    if state is not None:  # bitsandbytes
        told = state.as_dict(packed=True)
        yield from (told[name].detach() for name in sorted(told))
    elif not is_composed(tensor) and type(tensor).__module__.partition(".")[0] != "torch":
        raise _Unreadable(f"there is a {type(tensor).__name__}")


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor: uint8, in host memory."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), PIECE_BYTES):
        yield flat[start : start + PIECE_BYTES].cpu()


def _code_of(kinds: set[type]) -> list[str]:
    """Return the names of classes and their bases, in order.

    Those that are not of a known package come with the digest of their file.
    """
    bases = {base for kind in kinds for base in kind.__mro__}
    return sorted({_code(base) for base in bases})


def _code(kind: type) -> str:
    if f"{kind.__module__}.".startswith(OWN_CODE) and "transformers_modules" not in kind.__module__:
        return f"{kind.__module__}.{kind.__qualname__}"
    try:
        file = Path(inspect.getfile(kind))
        return f"{kind.__qualname__} {blake3(file.read_bytes()).hexdigest()}"
    except (OSError, TypeError):
        raise _Unreadable(f"the code of {kind.__qualname__} is in no file") from None
