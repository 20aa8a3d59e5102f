"""Server of ``observability``: page, metrics and events can be switched off and on while it serves.

    stdin   "metrics events"    these are on from now on, and nothing else
            "count"             all is on, and its processor time is counted from now on
    stdout  "done", and behind it what was counted, as JSON; seconds by part

On and off are the same process, model and memory: two servers differ by more than what is looked
for, by where their memory lies alone. What is off is not called, or does nothing at once. The end
of stdin ends the server.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import wraps
from threading import Event, Thread, local
from typing import ParamSpec, TypeVar

from kvtier.config import CacheConfig
from kvtier.engine import Engine, EngineConfig
from kvtier.ladder.cost_metrics import CostMetrics
from kvtier.ladder.gauges import Gauges
from kvtier.ladder.reuse_sampler import ReuseSampler
from kvtier.plan import CostModel
from kvtier.server import HttpServer, ServerConfig, bind
from kvtier.server.metrics import ServerMetrics
from kvtier.telemetry import Metrics
from kvtier.telemetry.block_events import BlockLog
from kvtier.telemetry.publisher import Publisher


def nothing(*arguments: object, **labels: object) -> None:
    """In the place of what tells somebody."""


def learn_prefill(account: CostMetrics, num_before: int, num_tokens: int, seconds: float) -> None:
    """The planner learns from it, whoever is told."""
    account._costs.observe_prefill(num_before, num_tokens, seconds)


MODEL = "watched"
P = ParamSpec("P")
T = TypeVar("T")

METHODS: dict[str, dict[type, tuple[str, ...]]] = {
    "metrics": {
        Metrics: ("count", "gauge", "observe", "record"),
        # ``ReuseSampler.left`` stays, or evicted blocks would stay marked: 0.1 us each.
        ReuseSampler: ("on_admit",),
        CostMetrics: ("planned", "hit", "loaded", "moved", "saved", "observe_prefill"),
        Gauges: ("refresh",),
        ServerMetrics: ("request", "first_token", "answered"),
    },
    "events": {BlockLog: ("prompt", "_put"), Publisher: ("_wait",)},
}
"""Methods that are called where something is reported, by part."""


class Switch:
    """All is on when it is made."""

    def __init__(self) -> None:
        self._publishes = Event()
        self._publishes.set()
        self._quiet: dict[tuple[type, str], Callable[..., object]] = {
            (CostMetrics, "observe_prefill"): learn_prefill,
            (Publisher, "_wait"): lambda publisher: self._publishes.wait(),
        }
        self._loud = {
            (owner, name): owner.__dict__[name]
            for methods in METHODS.values()
            for owner, names in methods.items()
            for name in names
        }

    def turn(self, parts: Collection[str]) -> None:
        """These are on, and no others. To be called while nobody asks the server anything."""
        for part, methods in METHODS.items():
            for owner, names in methods.items():
                for at in ((owner, name) for name in names):
                    method = self._loud[at] if part in parts else self._quiet.get(at, nothing)
                    setattr(*at, method)
        if "events" in parts:
            self._publishes.set()
        else:
            self._publishes.clear()

    def turn_all_on(self) -> None:
        self.turn(METHODS)


class Count:
    """The processor time of what is called where something is told, on whatever thread.

    A call within another is the outer one's, but for what would be called all the same. A look at
    the clock is counted with each.
    """

    def __init__(self) -> None:
        self._found: deque[tuple[str, int]] = deque()
        self._thread = local()

    def begin(self) -> None:
        """To be called once, and while all is on."""
        self._found.clear()
        for part, methods in METHODS.items():
            for owner, names in methods.items():
                for name in names:
                    setattr(owner, name, self._counted(part, owner.__dict__[name]))
        publish: Callable[[Publisher], None] = self._counted("events", Publisher._publish)
        Publisher._publish = publish  # type: ignore[assignment, method-assign]
        learn = self._not_counted(CostModel.observe_prefill)
        CostModel.observe_prefill = learn  # type: ignore[method-assign]

    def _counted(self, part: str, method: Callable[..., T]) -> Callable[..., T]:
        @wraps(method)
        def counted(*arguments: object, **labels: object) -> T:
            if getattr(self._thread, "is_counting", False):
                return method(*arguments, **labels)
            self._thread.is_counting, self._thread.besides_ns = True, 0
            began_ns = time.thread_time_ns()
            try:
                return method(*arguments, **labels)
            finally:
                took_ns = time.thread_time_ns() - began_ns
                self._found.append((part, took_ns - self._thread.besides_ns))
                self._thread.is_counting = False

        return counted

    def _not_counted(self, method: Callable[P, None]) -> Callable[P, None]:
        @wraps(method)
        def besides(*arguments: P.args, **named: P.kwargs) -> None:
            began_ns = time.thread_time_ns()
            method(*arguments, **named)
            self._thread.besides_ns = time.thread_time_ns() - began_ns

        return besides

    def seconds(self) -> dict[str, float]:
        """By part, since it began."""
        found = dict.fromkeys(METHODS, 0.0)
        for part, ns in [*self._found]:
            found[part] += ns / 1e9
        return found


def obey(switch: Switch, server: HttpServer) -> None:
    count = Count()
    for line in sys.stdin:
        if line.split() == ["count"]:
            switch.turn_all_on()
            count.begin()
        else:
            switch.turn(line.split())
        print("done", json.dumps(count.seconds()), flush=True)
    switch.turn_all_on()
    server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device-capacity", required=True)
    parser.add_argument("--events", required=True)
    arguments = parser.parse_args()
    config = EngineConfig(
        model=arguments.model,
        device_capacity=arguments.device_capacity,
        events=arguments.events,
        threads=1,
        cache=CacheConfig(host_capacity="2x"),
    )
    with Engine(config) as engine, bind("127.0.0.1", 0) as listener:
        server = HttpServer(engine, ServerConfig(served_model_name=MODEL), listener)
        Thread(target=obey, args=(Switch(), server), daemon=True).start()
        server.run(lambda url: print(url, flush=True))


if __name__ == "__main__":
    main()
