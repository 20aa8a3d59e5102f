"""Identity of a model that is in memory: all bytes of its weights, its settings and its code.

Its files do not suffice: the model may have been quantised, merged with an adapter or trained
since it was loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from secrets import token_hex
from threading import Lock, Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from transformers import PreTrainedModel

from kvtier.connectors.transformers.reach import ModelReach
from kvtier.core.hot import crc32c_many
from kvtier.core.system.process import num_cores
from kvtier.identity import Basis, Identity

logger = logging.getLogger(__name__)

SMALL_MODEL_BYTES = 1 << 30
"""This many bytes are identified at once, in a fraction of a second."""
PIECE_BYTES = 64 << 20
"""Bytes of a tensor that are read in one step, and copied first if a device has them."""
ROW_BYTES = 8 << 10
"""Bytes of a row of a tensor on a device, for its checksums."""
MAX_THREADS = 8
NUM_POLITE_THREADS = 2
"""Threads that read in the background, while the model may be in use."""
SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Methods that return the plain tensors of a sparse one, by layout."""

FACTS: tuple[Callable[[torch.Tensor], object], ...] = (
    *map(attrgetter, ("layout", "device", "dtype", "shape")),
    torch.Tensor.stride,
    torch.Tensor.data_ptr,
    torch.Tensor.is_neg,
    torch.Tensor.is_conj,
)
"""Everything about a plain tensor but its bytes. ``tensor.data`` can be set to any other."""

Mark = tuple[object, ...]
"""Place, shape, meaning and checksum of a tensor; first its identity, if its bytes are not here."""


class WeightsInMemory:
    """The identity of a loaded model, found again whenever the model has changed.

    ``current`` compares everything that ``ModelReach`` has found, by reference, and a checksum over
    all bytes of all tensors: writes through ``tensor.data``, NumPy or DLPack leave no other trace.
    That reads the weights once, as a decode step does. Only tensors that have changed are hashed
    again.

    Args:
        model: the model.
        forward: its own ``forward``. Default: ``model.forward``.
        small_bytes: up to this many bytes are hashed while a prompt waits; more in the background.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        forward: Callable[..., Any] | None = None,
        small_bytes: int = SMALL_MODEL_BYTES,
    ) -> None:
        self._model = model
        self._forward = forward
        self._small_bytes = small_bytes
        self._lock = Lock()
        self._reach: ModelReach | None = None
        self._reasons: list[ModelReach] = []  # keeps objects that an identity of this process names
        self._secret = token_hex(16)  # part of identities that no other process may have
        self._contents: TensorContents | None = None  # at the time of the identity
        self._identity: Identity | None = None
        self._digests: dict[Mark, bytes] = {}
        self._reader: Thread | None = None

    @property
    def basis(self) -> str:
        """Basis of the last identity; "being read" before the first."""
        return "being read" if self._identity is None else self._identity.basis.value

    def current(self) -> Identity | str | None:
        """Return the identity of the model as it is now; None while it is being read.

        Returns the reason if the model cannot be identified.
        """
        with self._lock:
            try:
                return self._current()
            except Exception as error:
                self._reach = self._identity = None
                return f"the model can't be read: {type(error).__name__}: {error!s:.100}"

    def _current(self) -> Identity | str | None:
        reach = self._reach
        if reach is None or not reach.is_same():
            reach = self._reach = ModelReach(self._model, self._forward)
            self._identity = None
        if reason := reach.odd or reach.opaque:
            return reason
        if self._identity is not None and self._contents is not None and self._contents.is_same():
            return self._identity
        contents = TensorContents(reach.tensors)
        if self._reader is not None and self._reader.is_alive():
            return None
        new = [name for name, mark in contents.marks.items() if mark not in self._digests]
        flat = (part for name in new for part in parts(reach.tensors[name]))
        if sum(part.numel() * part.itemsize for part in flat) <= self._small_bytes:
            self._read(reach, contents, min(MAX_THREADS, num_cores()))
            return self._identity
        self._reader = Thread(
            target=self._read,
            args=(reach, contents, NUM_POLITE_THREADS),
            name="kvtier-weights",
            daemon=True,
        )
        self._reader.start()
        return None

    def wait(self) -> None:
        """Wait until the reading in the background has ended."""
        if self._reader is not None:
            self._reader.join()

    def _read(self, reach: ModelReach, contents: TensorContents, threads: int) -> None:
        """Set the identity, if the model did not change meanwhile. Prompts wait otherwise."""
        digests, found = self._identify(reach, contents.marks, threads)
        if reach.is_same() and contents.is_same():
            self._contents, self._identity, self._digests = contents, found, digests

    def _identify(
        self, reach: ModelReach, marks: dict[str, Mark], threads: int
    ) -> tuple[dict[Mark, bytes], Identity]:
        """Return the digests of all tensors by their marks, and the identity of it all."""
        hasher = blake3(reach.digest)
        local = reach.local
        digests: dict[Mark, bytes] = {}
        for name, tensor in reach.tensors.items():
            mark = marks[name]
            if mark not in digests:  # tied weights are read once
                digests[mark] = self._digests.get(mark) or _digest(tensor, threads)
            hasher.update(f"\n{name} ".encode() + digests[mark])
            local = local or unreadable(name, tensor)
        if not local:
            return digests, Identity(hasher.hexdigest(), Basis.READ)
        logger.warning("KV is not found by later processes: %s", local)
        self._reasons.append(reach)
        offloaded = [mark[0] for mark in marks.values()]
        hasher.update(f"{self._secret} {reach.here} {offloaded}".encode())
        return digests, Identity(f"unknown {hasher.hexdigest()}", Basis.UNKNOWN)


# -- tensors ---------------------------------------------------------------------------------------


def is_composed(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of others: quantised by torchao, for instance."""
    return hasattr(tensor, "__tensor_flatten__")


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor consists of: all its bytes."""
    if is_composed(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from parts(getattr(tensor, name))
    elif tensor.layout in SPARSE:
        for name in SPARSE[tensor.layout]:
            yield getattr(tensor.detach(), name)()
    elif tensor.layout is not torch.strided:
        yield tensor.detach().to_dense()
    elif tensor.is_quantized:
        yield tensor.int_repr()
        if tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
            yield tensor.q_per_channel_scales()
            yield tensor.q_per_channel_zero_points()
    elif not tensor.is_meta:
        yield tensor.detach()


def meaning(tensor: torch.Tensor) -> str:
    """Return everything about a tensor but its elements; equal in every process."""
    told = f"{type(tensor).__qualname__} {tuple(tensor.shape)} {tensor.dtype}"
    if is_composed(tensor):
        names, settings = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = [meaning(getattr(tensor, name)) for name in names]
        told += f" of {', '.join(inner)} with {settings!r}"
    elif tensor.is_quantized and tensor.qscheme() is torch.per_tensor_affine:
        told += f" times {tensor.q_scale()!r} from {tensor.q_zero_point()}"
    return told


def unreadable(name: str, tensor: torch.Tensor) -> str:
    """Return why the bytes of a tensor do not determine its values, or ""."""
    if tensor.is_meta:
        return f"{name} is offloaded"
    if " at 0x" in meaning(tensor):
        return f"{name} is a {type(tensor).__name__} with settings that can't be read"
    return ""


class TensorContents:
    """Tensors at one time: their places and shapes, and checksums of all their bytes.

    Attributes:
        marks: of each tensor, by name.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        plain = {name: tensor for name, tensor in tensors.items() if _is_plain(tensor)}
        self._plain = [*plain.values()]
        self._others = {name: tensors[name] for name in tensors if name not in plain}
        self._pieces = _pieces_of(self._plain)
        # Whole columns, since a large model has a thousand tensors.
        self._facts = [[*map(fact, self._plain)] for fact in FACTS]
        self._crcs = self._pieces.checksums()
        self.marks: dict[str, Mark] = dict.fromkeys(tensors, ())  # in their order
        rows = zip(*self._facts, self._pieces.split(self._crcs), strict=True)
        self.marks.update(zip(plain, ((0, *row) for row in rows), strict=True))
        self.marks.update((name, _mark(tensor)) for name, tensor in self._others.items())

    def is_same(self) -> bool:
        """Whether the tensors are still so. Every byte is read, and little else is done."""
        return (
            all(
                [*map(fact, self._plain)] == held
                for fact, held in zip(FACTS, self._facts, strict=True)
            )
            and np.array_equal(self._pieces.checksums(), self._crcs)
            and all(_mark(tensor) == self.marks[name] for name, tensor in self._others.items())
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its own only part, and lies in one piece in host memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_quantized
    )


def _mark(tensor: torch.Tensor) -> Mark:
    """Return the mark of a tensor of any kind."""
    mark: list[object] = [id(tensor) if tensor.is_meta else 0, meaning(tensor)]
    for part in parts(tensor):
        mark += (part.data_ptr(), part.stride(), part.is_neg(), part.is_conj())
        if part.device.type == "cpu":
            held = part.contiguous()
            mark += _pieces_of([held]).checksums().tolist()
        else:
            mark.append(_device_checksum(part))
    return tuple(mark)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of tensors in host memory, each tensor contiguous.

    addresses, sizes: uint64 [num_pieces]. nums: pieces of each tensor.
    """

    addresses: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]
    nums: list[int]

    def checksums(self) -> npt.NDArray[np.uint32]:
        """Read all bytes. Return uint32 [num_pieces]."""
        return crc32c_many(self.addresses, self.sizes, min(MAX_THREADS, num_cores()))

    def split(self, crcs: npt.NDArray[np.uint32]) -> Iterator[tuple[int, ...]]:
        """Yield the checksums of each tensor."""
        found = iter(crcs.tolist())
        return (tuple(islice(found, num)) for num in self.nums)


def _pieces_of(parts: Sequence[torch.Tensor]) -> _Pieces:
    pieces, nums = [], []
    for part in parts:
        starts = range(0, max(part.nbytes, 1), PIECE_BYTES)
        pieces += [(part.data_ptr() + at, min(PIECE_BYTES, part.nbytes - at)) for at in starts]
        nums.append(len(starts))
    addresses, sizes = np.array(pieces, np.uint64).reshape(-1, 2).T
    return _Pieces(addresses.copy(), sizes.copy(), nums)


def _device_checksum(part: torch.Tensor) -> bytes:
    """Return sums over all rows and all columns of the bytes of a tensor, made on its device."""
    flat = part.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 4:
        flat = flat.clone()
    num_rows = flat.numel() // ROW_BYTES
    rows = flat[: num_rows * ROW_BYTES].view(torch.int32).view(num_rows, ROW_BYTES // 4)
    sums = (rows.sum(0), rows.sum(1), flat[num_rows * ROW_BYTES :].long())
    return blake3(torch.cat(sums).cpu().numpy().tobytes()).digest()


def _digest(tensor: torch.Tensor, threads: int) -> bytes:
    """Return the digest of all bytes of a tensor, and of their meaning."""
    hasher = blake3(meaning(tensor).encode(), max_threads=threads)
    for part in parts(tensor):
        hasher.update(f"\n{tuple(part.shape)} {part.dtype} ".encode())
        for piece in _pieces(part):
            hasher.update(piece.numpy().data)
    return hasher.digest()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor: uint8, in host memory."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), PIECE_BYTES):
        yield flat[start : start + PIECE_BYTES].cpu()
