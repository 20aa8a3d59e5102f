"""Gauges of the tiers: room, transfers in flight, queues, and open breakers."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from kvtier.ladder.topology import Topology
from kvtier.ladder.transfers import Transfers
from kvtier.telemetry import Metrics
from kvtier.telemetry.specs import BREAKER_STATE, QUEUED_SECONDS, SLOT_BYTES, TRANSFERS_IN_FLIGHT
from kvtier.transfer import Mover

PERIOD_S = 1.0


class Gauges:
    """Updates the gauges once per second, since each update queries every tier and route."""

    def __init__(
        self,
        topology: Topology,
        transfers: Transfers,
        mover: Mover,
        metrics: Metrics,
        slot_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._topology = topology
        self._transfers = transfers
        self._mover = mover
        self._metrics = metrics
        self._slot_bytes = slot_bytes
        self._clock = clock
        self._due_s = -inf

    def refresh(self) -> None:
        """Call ``update`` if it is due."""
        if self._clock() >= self._due_s:
            self.update()

    def update(self) -> None:
        self._due_s = self._clock() + PERIOD_S
        rooms = self._topology.rooms
        used = {name: room.num_used for name, room in rooms.items()}
        self._metrics.occupancy(used, {name: room.num_slots for name, room in rooms.items()})
        for name in rooms:
            self._metrics.gauge(SLOT_BYTES, self._slot_bytes, tier=name)
        for (src, dst), num in self._transfers.num_in_flight.items():
            self._metrics.gauge(TRANSFERS_IN_FLIGHT, num, src=src, dst=dst)
        for (src, dst), seconds in self._transfers.queued_s().items():
            self._metrics.gauge(QUEUED_SECONDS, seconds, src=src, dst=dst)
        for name in self._topology.storages:
            self._metrics.gauge(BREAKER_STATE, self._mover.breaker(name), tier=name)
