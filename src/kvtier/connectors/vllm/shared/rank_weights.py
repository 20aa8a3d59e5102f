"""Weights of the model on one rank: a digest of all of them, and a watch that reads some.

Loaders of vLLM write to ``parameter.data``, which leaves no trace in a tensor's version. So the
watch compares elements, too.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch

logger = logging.getLogger(__name__)

PIECE_WORDS = 1 << 22
"""Words of 8 bytes that are digested at a time. A device needs memory for two pieces."""
NUM_PARAMETERS = 64
"""Parameters in one look. All of them have their turn."""
NUM_SAMPLES = 32
"""Elements of each parameter that a look compares."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types to compare bits by, by size. As numbers, NaN is never equal to itself."""


def digests(worker: Any) -> list[tuple[str, int]] | None:
    """Return a digest of each parameter and buffer of a vLLM worker's model; None if one has none.

    vLLM's executor calls it on a rank. The digests show whether a call has changed the weights.
    They are no names: another model with equal digests could be made on purpose.
    """
    try:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        model = worker.get_model()
        named = (*model.named_parameters(), *model.named_buffers())
        found = [(name, _digest(part)) for name, tensor in named for part in _parts(tensor)]
        return [(name, int(digest)) for name, digest in found]
    except (RuntimeError, TypeError, AttributeError) as error:
        logger.info("the weights can't be read: %r", error)
        return None


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the tensors that hold the bytes of one that may be composed, such as TorchAO's."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _parts(getattr(tensor, name))


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return an odd random factor for each word of a piece: one word that changes is noticed."""
    random = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (PIECE_WORDS,), generator=random) * 2 + 1
    return factors.to(device)


def _digest(tensor: torch.Tensor) -> torch.Tensor | int:
    """Return a digest of 64 bits of a tensor's bytes, on its device."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    num = data.numel() // 8 * 8
    words = data[:num] if data.storage_offset() % 8 == 0 else data[:num].clone()
    factors, digest = _factors(data.device), torch.zeros((), dtype=torch.int64, device=data.device)
    for piece in (*torch.split(words.view(torch.int64), PIECE_WORDS), data[num:].to(torch.int64)):
        digest = digest * 0x9E3779B97F4A7C1 + (piece * factors[: len(piece)]).sum()
    return digest


class Look:
    """A few parameters' places and elements, compared with those of the look before.

    Args:
        stamp: where they are, and their versions.
        values: of their elements, on their device.
        before: stamp and values when they had their turn before.
    """

    def __init__(self, stamp: object, values: Sequence[torch.Tensor], before: Look | None) -> None:
        self.stamp = stamp
        self.values = values
        self._differs: torch.Tensor | None = None
        self._ready: torch.cuda.Event | None = None
        self._has_changed = before is not None and stamp != before.stamp
        if before is None or self._has_changed or not values:
            return
        # On CUDA without waiting for the device, which may compute a step that began before.
        pairs = zip(values, before.values, strict=True)
        differs = torch.stack([(new != old).any() for new, old in pairs]).any()
        if differs.device.type != "cuda":
            self._has_changed = bool(differs)
            return
        self._differs = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._differs.copy_(differs, non_blocking=True)
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready.record()

    @property
    def has_changed(self) -> bool:
        """Whether the weights were changed. Waits for the device where that is not known yet."""
        if self._differs is not None and self._ready is not None:
            self._ready.synchronize()
            self._has_changed, self._differs = bool(self._differs), None
        return self._has_changed


class ParameterWatch:
    """Notices on a rank that the weights of its model are others than before.

    A look costs the same for every model: it reads some elements of ``NUM_PARAMETERS`` parameters,
    all of which have their turn. So it notices at once what changes most parameters, and later what
    changes a few. Parameters are not kept from being freed.

    Weights that vLLM moves itself are left out: of experts, which change places between ranks, and
    of layers that share their memory, since they are brought to it from the host in each step. So
    are tensors composed of others.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        balanced = [module for module in model.modules() if hasattr(module, "get_expert_weights")]
        moving = {id(parameter) for module in balanced for parameter in module.parameters()}
        found = [
            parameter
            for parameter in model.parameters()
            if id(parameter) not in moving
            and parameter.numel()
            and not hasattr(parameter, "__tensor_flatten__")
        ]
        users = Counter(each.data_ptr() for each in found)
        found = [each for each in found if users[each.data_ptr()] == 1]
        self._turns = [
            [weakref.ref(each) for each in found[at : at + NUM_PARAMETERS]]
            for at in range(0, len(found), NUM_PARAMETERS)
        ]
        self._next = 0
        self._looks: list[Look] = []

    def begin_anew(self) -> None:
        """Make the weights at the next look the reference for later looks.

        They are not read now, because a sleep may have freed their memory.
        """
        self._looks = []

    def look(self) -> Look | None:
        """Begin a look at some parameters, in the order of the device's work."""
        if not self._turns:
            return None
        try:
            if not self._looks:
                self._looks = [_look(turn, None) for turn in self._turns]
            at = self._next = (self._next + 1) % len(self._turns)
            self._looks[at] = _look(self._turns[at], self._looks[at])
            return self._looks[at]
        except (RuntimeError, TypeError, AttributeError, LookupError) as error:
            logger.warning("only calls to vLLM show new weights, no look at them: %r", error)
            self._turns = []
            return None


def _look(turn: Sequence[weakref.ref[torch.nn.Parameter]], before: Look | None) -> Look:
    stamp: list[object] = []
    groups: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    for reference in turn:
        tensor = reference()
        stamp.append(None if tensor is None else id(tensor))
        if tensor is None or tensor.layout is not torch.strided or tensor.is_meta:
            continue
        stamp += (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        groups.setdefault((tensor.device, tensor.itemsize), []).append(_samples(tensor))
    return Look(stamp, [torch.cat(group) for group in groups.values()], before)


def _samples(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of some elements, from the first one in memory to the last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in pairs)
    step = max(1, span // NUM_SAMPLES)
    found = tensor.detach().as_strided((min(NUM_SAMPLES, span),), (step,), tensor.storage_offset())
    return found.view(INTEGERS[tensor.itemsize])


def model_of_caller() -> torch.nn.Module | None:
    """Return the model of the rank whose method has called, at any depth; None if there is none.

    vLLM gives a connector no other way to its model.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        runner = frame.f_locals.get("self")
        get_model = getattr(type(runner), "get_model", None)
        if get_model is not None:
            found = get_model(runner)
            return found if isinstance(found, torch.nn.Module) else None
        frame = frame.f_back
    return None
