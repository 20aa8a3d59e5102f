"""Limits on what one request loads and stores, from its client's ``kv_transfer_params``.

The parameters are those of vLLM's OffloadingConnector. Under it, vLLM applies ``max_load_tokens``
and ``max_offload_tokens``, and kvtier ``kv_load_tiers``. ``KvtierConnector`` applies all three.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.core.errors import printable
from kvtier.core.types import DISK, HOST

logger = logging.getLogger(__name__)

MEDIA = ("CPU", "STORAGE")
LOCALITIES = ("LOCAL", "REMOTE")
KINDS = {HOST: ("CPU", "LOCAL"), DISK: ("STORAGE", "LOCAL")}
UNLIMITED = 1 << 62

Matcher = tuple[str | None, str | None]
"""Medium and locality of tiers; None for any."""


def kind_of(tier: str) -> tuple[str, str]:
    """Return vLLM's names of a tier's medium and locality. A store is elsewhere."""
    return KINDS.get(tier, ("STORAGE", "REMOTE"))


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request.

    Attributes:
        max_load: Largest number of tokens to load behind the tokens that the device has.
        max_store: Number of leading tokens behind which nothing is stored.
        tiers: The request loads from tiers that match one of these; None for all tiers.
    """

    max_load: int = UNLIMITED
    max_store: int = UNLIMITED
    tiers: Sequence[Matcher] | None = None

    @classmethod
    def read(cls, params: Mapping[str, Any] | None) -> RequestLimits:
        """Read a request's parameters. As vLLM does, ignore what makes no sense, and log it."""
        if not params:
            return cls()
        return cls(
            _num_tokens(params, "max_load_tokens"),
            _num_tokens(params, "max_offload_tokens"),
            _tiers(params.get("kv_load_tiers")),
        )

    def allows(self, tier: str) -> bool:
        """Return whether the request may load from a tier."""
        if self.tiers is None:
            return True
        medium, locality = kind_of(tier)
        return any(one in (None, medium) and other in (None, locality) for one, other in self.tiers)


def _num_tokens(params: Mapping[str, Any], name: str) -> int:
    given = params.get(name)
    if type(given) is int and given >= 0:
        return given
    if given is not None:
        logger.warning("%s ignored: %s is no number of tokens", name, printable(str(given)))
    return UNLIMITED


def _tiers(given: object) -> list[Matcher] | None:
    """Read ``kv_load_tiers``: objects with "medium", "locality", or both. [] is no tier at all."""
    if given is None:
        return None
    found = [_matcher(each) for each in given] if isinstance(given, list) else [None]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        logger.warning("kv_load_tiers ignored, all or in part: %s", printable(str(given)))
    return known if known or not found else None


def _matcher(given: object) -> Matcher | None:
    """Return one entry of ``kv_load_tiers``; None for one that names nothing known."""
    if not isinstance(given, dict):
        return None
    medium, locality = given.get("medium"), given.get("locality")
    medium = medium.upper() if isinstance(medium, str) else medium
    locality = locality.upper() if isinstance(locality, str) else locality
    if medium not in (None, *MEDIA) or locality not in (None, *LOCALITIES):
        return None
    return medium, locality
