"""Hints in requests to a real SGLang server: what was asked for is done, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")

from kvtier.connectors.sglang.shared.client_hints import HintReader
from kvtier.connectors.sglang.shared.prefill import WATCH
from kvtier.connectors.sglang.shared.prompt_reporting import QueuedRequest
from kvtier.connectors.sglang.shared.ranks import RankConfig
from kvtier.connectors.sglang.shared.settings import LinkerSettings
from kvtier.core.hints import Hint
from kvtier.core.types import ClientHints
from tests.engines.sglang.servers import FRONTS, LONG, NUM_WHOLE, PAGE, prompt, server
from tests.kit.waiting import wait_until

ACTIONS = {"kvtier.demote": {}, "kvtier.prefetch": {"within_s": 1.0}, "kvtier.fly": {}}


def envelope(**actions: object) -> dict[str, object]:
    """Return an orchestrator's hints. actions: payloads by type."""
    return {
        "protocol_version": "0.1",
        "message_id": "1",
        "actions": [
            {"action_id": name, "action_type": name, "action_version": "1.0", "payload": payload}
            for name, payload in actions.items()
        ],
    }


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("front", FRONTS)
def test_actions_are_carried_out_and_counted(tmp_path: Path, front: str) -> None:
    folder, prompts = tmp_path / "slab", [prompt(seed, LONG) for seed in range(2)]
    with server(tmp_path / "log", *FRONTS[front](folder), "--enable-metrics") as it:

        def counted(metric: str, **labels: str) -> float:
            found = it.metrics(metric)
            return sum(value for given, value in found if labels.items() <= given.items())

        def wait_for(metric: str, **labels: str) -> None:
            wait_until(lambda: counted(metric, **labels) == 1, f"{metric} of {labels}")

        it.ask(prompts[0], 1)
        it.settle(folder, LONG // PAGE)
        it.ask(prompts[0], 1, hints=envelope(**ACTIONS))
        for kind in ("kvtier.demote", "kvtier.prefetch", "unknown"):
            wait_for("sglang:kvtier_hint_actions_total", action=kind)
        it.ask(prompts[1], 1, hints=envelope(**{"kvtier.pin": {}, "kvtier.release": {}}))
        it.ask(prompt(2, LONG), 1)  # the storage back end applies hints in its own calls
        for action in ("pin", "release", "demote"):
            outcome = "done" if front == "linker" or action != "demote" else "no_storage"
            wait_for("kvtier_hints_total", action=action, outcome=outcome)
        if front == "storage":  # it has no memory that is read into
            wait_for("kvtier_hints_total", action="prefetch", outcome="no_storage")
            return
        wait_for("kvtier_hints_total", action="prefetch", outcome="begun")
        it.flush()
        assert it.ask(prompts[0], 1).num_cached == NUM_WHOLE
        wait_for("kvtier_hints_total", action="prefetch", outcome="used")


class Told:
    """Applied hints, with the number of pages that each is on."""

    def __init__(self, client_hints: ClientHints = ClientHints.ON) -> None:
        self.hints: list[tuple[int, Hint]] = []
        self.fails = False
        config = RankConfig(1, 2, 0, 1, 0, 1, 1, "")  # not the first, which counts
        self.reader = HintReader(LinkerSettings(client_hints=client_hints), config, self._tell)

    def _tell(self, request: QueuedRequest) -> None:
        assert not self.fails
        assert request.hint is not None
        self.hints.append((len(request.keys(PAGE)), request.hint))


def begin(req: Any, is_eagle: bool = False) -> None:
    for begun in WATCH.begin_listeners:
        begun(req, SimpleNamespace(tree_core=SimpleNamespace(is_eagle=is_eagle)))


def end(req: Any) -> None:
    for ended in WATCH.end_listeners:
        ended(req)


def request(**actions: object) -> SimpleNamespace:
    return SimpleNamespace(
        rid="r",
        origin_input_ids=list(range(2 * PAGE)),
        output_ids=list(range(PAGE)),
        extra_key=None,
        cache_salt="tenant",
        kv_hints=envelope(**actions) if actions else None,
    )


@pytest.fixture(autouse=True)
def closes() -> Iterator[None]:
    yield
    WATCH.begin_listeners.clear()
    WATCH.end_listeners.clear()


def test_a_hint_is_applied_once_at_the_begin_and_at_the_end_with_the_answer() -> None:
    told = Told()
    plain, hinted = request(), request(**{"kvtier.pin": {}, "kvtier.prefetch": {"within_s": 2}})
    for _ in range(2):  # a prompt in pieces
        begin(plain)
        begin(hinted)
    assert [num for num, hint in told.hints if hint.retain] == [2]
    end(hinted)
    end(hinted)
    assert told.hints[1:] == [(3, Hint(prefetch_within_s=2))]
    begin(request(**{"kvtier.release": {}}), is_eagle=True)  # the last token has no successor
    end(hinted)
    assert told.hints[2:] == [(2, Hint(ended=True))]
    told.reader.close()
    assert not WATCH.begin_listeners
    assert not WATCH.end_listeners


def test_hints_that_are_off_are_not_read() -> None:
    told = Told(ClientHints.OFF)
    begin(hinted := request(**{"kvtier.pin": {}}))
    end(hinted)
    assert told.hints == []


def test_a_hint_that_fails_does_not_fail_its_request(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    told.fails = True
    begin(request(**{"kvtier.pin": {}}))
    assert "a hint was not applied" in caplog.text
