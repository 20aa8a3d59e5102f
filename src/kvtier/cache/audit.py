"""Audit of hits: a part of a hit is computed again and compared with what was cached.

Checksums show that a block is the one that was stored. An audit shows that it is what the model
computes now. It is for every engine that can compute: one module decides which hits are audited,
measures and judges differences, and says what is not used any more after one.

    chooses -> piece -> (the engine computes) -> token_distances -> judge

**Distance.** Of one token in one layer and part (K or V): the norm of the difference over the norm
of the recomputed vector. A block is judged by the greatest of these: a mean over the block would
hide a last token that is missing, a mean over layers a single one. 0 is for equal numbers only.
Unrelated vectors of equal length are about 1.41 (the square root of 2) apart, a missing token
(zeros) 1, and KV that was rounded to 8 bits 0.03 to 0.05.

**Tolerance.** 0 where this process has made both computations in the same shapes (``kvtier serve``,
``attach``), and ``ELSEWHERE`` where another one may have made the first: a name does not contain
all that rounding depends on, and a block does not contain its writer. In other shapes rounding
differs more, and ``Tolerance`` learns by how much: from pairs of computations of the same block
without the cache, ``FACTOR`` times the greatest of their distances. That is a maximum over few
blocks, and a maximum over many more is larger: a factor of 4 covers it, since such distances have
no long tail. The cap of 0.25 is five times what rounding causes in bfloat16 (0.05 in deep layers)
and a fifth of 1.41. It is all that applies until ``MIN_LEARNED`` pairs were seen. An engine that
promises equal bits in any batch has distances of 0 there, and so a tolerance of 0.

**Quarantine.** One difference does not tell whether one block is wrong or all that were stored in
the same way. So the first one in a namespace changes the namespace's name: all that was stored in
it before, in any tier and by any process, is missed, and not deleted. What is computed from then on
is stored and used under the new name, which no other process knows. A second difference, under the
new name, is the fault of this process as it runs now: the namespace is closed, which means that
nothing of it is found or stored any more. Both last until the process ends. A name that changes is
the only consistent way: a block that is missed under its own name could not be stored again.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtier.core.types import BlockId
from kvtier.observe import Metrics
from kvtier.observe.specs import AUDITS

logger = logging.getLogger(__name__)

CAP = 0.25
"""Largest tolerance. See the module's docstring for this and the next two."""
FACTOR = 4.0
MIN_LEARNED = 8

ELSEWHERE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Tolerance for KV computed in the same shapes, perhaps by another process, by dtype: its processor
or its number of threads may round otherwise."""

COMPARED = "computed again and compared"
"""In sentences about an audited prompt, before the outcome."""

Distances = npt.NDArray[np.float32]
"""Distances of cached KV from recomputed KV: [num_layers, num_parts, num_tokens]."""

_LEAST = float(np.finfo(np.float32).tiny)


class AuditOutcome(StrEnum):
    """Outcome of one audit, as the metric counts it."""

    EQUAL = "equal"
    WITHIN_TOLERANCE = "within_tolerance"
    DIFFERENT = "different"
    SKIPPED = "skipped"
    """It was chosen, and did not take place: the engine had no idle moment or no room for it."""


@dataclass(frozen=True, slots=True)
class AuditedPiece:
    """Facts about the piece of a hit that was computed again.

    Attributes:
        tier: tier that had it when the request found it.
        namespace: name under which it was found.
        first: position of its first token in the prompt.
        tolerance: greatest distance that is no difference; 0 for equal numbers only.
        age_s: seconds since this process stored it; None if it is not known to have done so.
        has_first_layer: whether the first of the distances' layers is the model's first one.
        block_tokens: tokens of each of its blocks; 0 for one block.
    """

    tier: str
    namespace: bytes
    first: int
    tolerance: float
    age_s: float | None = None
    has_first_layer: bool = True
    block_tokens: int = 0

    @property
    def writer(self) -> str:
        """The process that stored it, in words."""
        return "unknown" if self.age_s is None else "this process"


class Auditor:
    """Chooses the hits that are audited, judges what was found, and counts.

    Args:
        share: of hits, 0 to 1; also an attribute.
        metrics: of the cache.
        pick: source of random numbers.
    """

    def __init__(self, share: float, metrics: Metrics, pick: random.Random | None = None) -> None:
        self.share = share
        self._metrics = metrics
        self._random = pick or random.Random()
        self.tolerance = Tolerance()
        self.quarantine = Quarantine()

    def chooses(self) -> bool:
        """Whether to audit a hit. Call it once per hit: every call draws."""
        return self._random.random() < self.share

    def piece(self, num_pieces: int) -> int:
        """Return which of ``num_pieces`` pieces to audit, each with the same probability."""
        return self._random.randrange(num_pieces)

    def skip(self, tier: str) -> None:
        """Count an audit that did not take place."""
        self._metrics.count(AUDITS, tier=tier, outcome=AuditOutcome.SKIPPED)

    def judge(self, distances: Distances, piece: AuditedPiece) -> AuditOutcome:
        """Return the outcome of an audit, and count it. A difference is logged and quarantined."""
        greatest = float(distances.max(initial=0.0))
        if greatest == 0:
            outcome = AuditOutcome.EQUAL
        elif greatest <= piece.tolerance:
            outcome = AuditOutcome.WITHIN_TOLERANCE
        else:
            outcome = AuditOutcome.DIFFERENT
        self._metrics.count(AUDITS, tier=piece.tier, outcome=outcome)
        if outcome is AuditOutcome.DIFFERENT:
            layer, _, token = np.unravel_index(int(distances.argmax()), distances.shape)
            logger.warning(
                "cached KV is not what the model computes now tier=%s age_s=%s writer=%r "
                "namespace=%s first_token=%d end_token=%d worst_token=%d layer=%d distance=%.3g "
                "tolerance=%.3g likely_cause=%r measure=%r",
                piece.tier,
                "unknown" if piece.age_s is None else round(piece.age_s),
                piece.writer,
                piece.namespace.hex()[:16],
                piece.first,
                piece.first + distances.shape[2],
                piece.first + token,
                layer,
                greatest,
                piece.tolerance,
                likely_cause(distances, piece),
                self.quarantine.add(piece.namespace),
            )
        return outcome


def likely_cause(distances: Distances, piece: AuditedPiece) -> str:
    """Return what the pattern of a difference suggests.

    The first layer's K and V depend on a token, its position and the weights, not on attention.
    """
    differs = ~(distances <= piece.tolerance)  # NaN differs
    first, num = differs[0], distances.shape[2]
    by_block = first.any(axis=0).reshape(-1, piece.block_tokens or num)
    if piece.has_first_layer and not first.any():
        return (
            "the first layer is the same and later ones are not: attention computes something "
            "else than when the block was stored (another kernel, mask or window, or an adapter), "
            "or cached KV before it is wrong"
        )
    if piece.has_first_layer and len(first) == 2 and not first[1].any():
        return "keys differ in the first layer and values do not: positions (RoPE) differ"
    if (by_block.any(axis=1) & ~by_block.all(axis=1)).any():
        return (
            f"{by_block.sum()} of {num} tokens differ, and others of the same block do not: they "
            "were not written yet when the block was copied, or were overwritten"
        )
    if not piece.has_first_layer:
        return "unknown"
    return (
        "the first layer differs in all tokens of a block: it is the KV of other tokens (a block "
        "in the place of another, or copied before it was computed), or of other weights or "
        "another adapter"
    )


# -- distances -------------------------------------------------------------------------------------


def token_distances(found: Any, recomputed: Any) -> list[float]:
    """Return the distance of each token's KV in one layer and part, computed where it lies.

    In float32: the temporary memory is a few times that layer's part.

    found, recomputed: tensors of torch, [num_tokens, ...], of any dtype that it converts.
    """
    ours, theirs = (part.flatten(1).float() for part in (found, recomputed))
    if ours.equal(theirs):
        return [0.0] * len(ours)
    distances = (ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp_min(_LEAST)
    differs = ((ours != theirs) & ~(ours.isnan() & theirs.isnan())).any(dim=1)
    # Squares of tiny numbers are 0; NaN is no distance, and must not pass for one.
    distances = distances.nan_to_num(float("inf")).clamp_min(_LEAST).where(differs, 0.0)
    as_list: list[float] = distances.tolist()
    return as_list


def stacked(layers: Iterable[Iterable[Sequence[float]]]) -> Distances:
    """Return the distances of all layers, from those of each layer's parts.

    Where a layer has fewer parts than another one (an indexer's keys), the others are zeros.
    """
    found = [[*parts] for parts in layers]
    num_parts = max(map(len, found))
    made = np.zeros((len(found), num_parts, len(found[0][0])), np.float32)
    for layer, parts in zip(made, found, strict=True):
        layer[: len(parts)] = parts
    return made


class Tolerance:
    """Greatest distance that two computations of the same KV may have, learned.

    The greatest of the last ``LEARNED`` distances counts.
    """

    LEARNED = 1024

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=self.LEARNED)

    def learn(self, distance: float) -> None:
        """Add the greatest distance of two computations of one block, neither with the cache."""
        self._seen.append(distance)

    @property
    def value(self) -> float:
        """The tolerance now, ``CAP`` at most."""
        return CAP if len(self._seen) < MIN_LEARNED else min(CAP, FACTOR * max(self._seen))


# -- what is known of a block, and what is not used any more ---------------------------------------


class ComputedBlocks:
    """Blocks that this process computed, and when: for blocks that were known by number.

    An index counts its blocks up, so what was committed within a few seconds is one run of numbers.
    The last ``MAX_RUNS`` runs are kept.

    clock: seconds.
    """

    MAX_RUNS = 4096
    RUN_S = 10.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._runs: deque[tuple[int, int, float]] = deque(maxlen=self.MAX_RUNS)

    def note(self, blocks: Sequence[BlockId]) -> None:
        """Note blocks that the index has taken over just now."""
        last: int = self._runs[-1][1] if self._runs else -1
        new = [block for block in blocks if block > last]
        if not new:
            return  # they were known before
        first, now = int(min(new)), self._clock()
        if self._runs and first == last + 1 and now - self._runs[-1][2] < self.RUN_S:
            first, _, now = self._runs.pop()
        self._runs.append((first, max(new), now))

    def age_s(self, block: BlockId) -> float | None:
        """Return the seconds since this process computed a block; None if that is not known."""
        written = (at for first, last, at in self._runs if first <= block <= last)
        at = next(written, None)
        return None if at is None else self._clock() - at


class Quarantine:
    """Namespaces of which cached KV was found to be wrong. Any thread may ask; one changes it.

    It costs nothing until then. See the module's docstring for the rule.
    """

    def __init__(self) -> None:
        self._names: dict[bytes, list[bytes]] = {}
        self._closed: set[bytes] = set()

    def names(self, namespace: bytes) -> Sequence[bytes]:
        """Return the names that a namespace has had, the present one last. Each has 32 bytes."""
        return self._names.get(namespace, (namespace,))

    def is_closed(self, name: bytes) -> bool:
        """Whether nothing may be found or stored under a present name."""
        return name in self._closed

    def add(self, name: bytes) -> str:
        """Note a difference in KV that was found under ``name``. Return what follows from it."""
        of_name = (names for names in self._names.values() if name in names)
        names = next(of_name, [name])
        if names[-1] != name or name in self._closed:
            return "none: this KV is not used any more"
        # Its own: another process that used the same name might store the same fault under it.
        renamed = blake3(names[0] + os.urandom(16)).digest()
        self._names[names[0]] = [*names, renamed]
        if len(names) == 1:
            return "KV that was stored in this namespace before now is not used any more"
        self._closed.add(renamed)
        return "the namespace is not cached any more, until this process is started again"
