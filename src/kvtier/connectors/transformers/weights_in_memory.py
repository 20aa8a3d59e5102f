"""Identity of a model that is in memory: all bytes of its weights, its settings and its code.

Files can't tell what a model computes with: it may have been quantised, merged with an adapter or
trained since it was loaded.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from threading import Lock, Thread

import torch
from blake3 import blake3
from transformers import PreTrainedModel

from kvtier.identity import Basis, Identity, unknown
from kvtier.system.process import num_cores

logger = logging.getLogger(__name__)

SMALL_MODEL_BYTES = 1 << 30
"""The bytes of a smaller model are read at once, in a fraction of a second."""
PIECE_BYTES = 64 << 20
"""Bytes of a tensor that are read in one step, and copied first if a device has them."""
MAX_THREADS = 8
NUM_POLITE_THREADS = 2
"""Threads that read in the background, while the model may be in use."""
OWN_CODE = ("torch.", "transformers.", "builtins.")
"""Packages whose version stands for their code: it is in every namespace."""
UNTOLD = {
    "_name_or_path",
    "_is_hf_initialized",
    "_original_object_hash",
    "transformers_version",
    "use_cache",
}
"""Settings that change no KV, some of which differ in each process."""


class _Unreadable(Exception):  # noqa: N818 - a reason, and no failure
    """The weights cannot be read; the message says why."""


class WeightsInMemory:
    """The identity of a loaded model, read again whenever the model has changed.

    Changes are noticed by the addresses and versions of all tensors and by the settings of all
    modules. In-place changes through ``tensor.data`` leave no trace there: call ``forget`` after
    them.

    Args:
        model: the model.
        small_bytes: a model of up to this size is read while its first prompt waits; a larger one
            in the background.
    """

    def __init__(self, model: PreTrainedModel, small_bytes: int = SMALL_MODEL_BYTES) -> None:
        self._model = model
        self._small_bytes = small_bytes
        self._lock = Lock()
        self._stamp = b""
        self._identity: Identity | None = None
        self._reader: Thread | None = None

    def current(self) -> Identity | None:
        """Return the identity of the model as it is now; None while it is being read."""
        with self._lock:
            return self._current()

    def _current(self) -> Identity | None:
        stamp = _stamp(self._model)
        if stamp == self._stamp and self._identity is not None:
            return self._identity
        if self._reader is not None and self._reader.is_alive():
            return None
        if _num_bytes(self._model) <= self._small_bytes:
            self._read(stamp, min(MAX_THREADS, num_cores()))
            return self._identity
        self._reader = Thread(
            target=self._read,
            args=(stamp, NUM_POLITE_THREADS),
            name="kvtier-weights",
            daemon=True,
        )
        self._reader.start()
        return None

    def is_still(self, identity: Identity) -> bool:
        """Whether the model is known to be unchanged since it had this identity."""
        return self._identity == identity and _stamp(self._model) == self._stamp

    def forget(self) -> None:
        """Read the model again before its next prompt."""
        self._identity = None

    def wait(self) -> None:
        """Wait until the reading in the background has ended."""
        if self._reader is not None:
            self._reader.join()

    def _read(self, stamp: bytes, threads: int) -> None:
        """Set the identity, if the model did not change meanwhile. Prompts wait otherwise."""
        try:
            found = Identity(_digest(self._model, threads), Basis.READ)
        except _Unreadable as reason:
            found = unknown(f"the weights in memory can't be read: {reason}")
        except RuntimeError as error:  # torch: no such view, or no memory on the device
            found = unknown(f"the weights in memory can't be read: {error}")
        if _stamp(self._model) == stamp:
            self._stamp, self._identity = stamp, found


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters and buffers by name; those that are shared once per name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _num_bytes(model: PreTrainedModel) -> int:
    return sum(tensor.nbytes for _, tensor in _tensors(model))


def _stamp(model: PreTrainedModel) -> bytes:
    """Return a digest that differs after changes of the model. Reads no weights."""
    hasher = blake3()
    for name, tensor in _tensors(model):
        version = 0 if tensor.is_inference() else tensor._version
        place = 0 if _is_composed(tensor) else tensor.data_ptr()
        hasher.update(f"{name} {id(tensor)} {place} {version}\n".encode())
    _add_settings(hasher.update, model)
    return hasher.digest()


def _digest(model: PreTrainedModel, threads: int) -> str:
    """Return a digest of all that decides on the model's KV."""
    hasher = blake3(max_threads=threads)
    _add_settings(hasher.update, model)
    for code in sorted({_code_of(type(module)) for module in model.modules()}):
        hasher.update(code.encode())
    seen: dict[tuple[object, ...], int] = {}
    for name, tensor in _tensors(model):
        hasher.update(f"\n{name} ".encode())
        for part in _parts(tensor):
            where = (part.data_ptr(), part.shape, part.stride(), part.dtype)
            if where in seen:  # tied weights are read once
                hasher.update(f"as {seen[where]}".encode())
                continue
            seen[where] = len(seen)
            hasher.update(f"{tuple(part.shape)} {part.dtype} ".encode())
            for piece in _pieces(part):
                hasher.update(piece.numpy().data)
    return hasher.hexdigest()


def _is_composed(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__")


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of a parameter, which may be quantised."""
    if tensor.is_meta:
        raise _Unreadable("some are offloaded")
    if _is_composed(tensor):  # torchao and other subclasses
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _parts(getattr(tensor, name))
        return
    yield tensor.detach()
    state = getattr(tensor, "quant_state", None)
    if state is not None:  # bitsandbytes
        told = state.as_dict(packed=True)
        yield from (told[name].detach() for name in sorted(told))
    elif type(tensor).__module__.partition(".")[0] != "torch":
        raise _Unreadable(f"there is a {type(tensor).__name__}")


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor: uint8, in host memory."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), PIECE_BYTES):
        yield flat[start : start + PIECE_BYTES].cpu()


def _add_settings(add: Callable[[bytes], object], model: PreTrainedModel) -> None:
    """Add the settings of the configuration and of every module: numbers, names, and such.

    Adapters are switched, scaled and merged by such settings.
    """
    add(_settings(model.config).encode())
    for name, module in model.named_modules():
        add(f"\n{name} {type(module).__qualname__} {_settings(module)}".encode())


def _settings(owner: object) -> str:
    told = []
    for name, value in vars(owner).items():
        if name in UNTOLD:
            continue
        if hasattr(value, "to_diff_dict"):  # a configuration in another
            told.append(f"{name}={{{_settings(value)}}}")
        elif _is_plain(value):
            told.append(f"{name}={value!r}")
    return ", ".join(sorted(told))


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(
        value, bool | int | float | str | Enum | torch.dtype | torch.Size
    )


def _code_of(kind: type) -> str:
    """Return the name of a class, with the digest of its file if it is not of a known package."""
    if f"{kind.__module__}.".startswith(OWN_CODE) and "transformers_modules" not in kind.__module__:
        return f"{kind.__module__}.{kind.__qualname__}"
    try:
        file = Path(inspect.getfile(kind))
        return f"{kind.__qualname__} {blake3(file.read_bytes()).hexdigest()}"
    except (OSError, TypeError):
        raise _Unreadable(f"the code of {kind.__qualname__} is in no file") from None
