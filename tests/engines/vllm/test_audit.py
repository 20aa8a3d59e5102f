"""A real vLLM that audits its hits: faults that no checksum shows are found, and nothing else."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.auditing import FAULT
from tests.engines.vllm.engines import (
    BLOCK,
    Prompt,
    connector,
    count,
    engine,
    own_connector,
    prompt,
    reset,
    run,
)
from tests.engines.vllm.test_lora import OPTIONS as LORA
from tests.engines.vllm.test_lora import ask, make_adapter
from tests.kit.nodes import running
from tests.kit.waiting import wait_until

MODULE = "tests.engines.vllm.auditing"
ROPE = {"rope_type": "default", "rope_theta": 123.0}
SIZES: dict[str, Any] = {"host_capacity": "256MiB", "audit": 1.0}
LINE = re.compile(
    r"cached KV is not .* tier=(\w+) .* first_token=(\d+) .* worst_token=(\d+) layer=(\d+)"
)


def faulty(**settings: Any) -> dict[str, Any]:
    """Return the configuration of kvtier's own front with the fault of the environment."""
    config = own_connector(**SIZES | settings)
    return config | {"kv_connector": "FaultConnector", "kv_connector_module_path": MODULE}


def faulty_spec(**settings: Any) -> dict[str, Any]:
    """Return that of vLLM's OffloadingConnector."""
    return connector(**SIZES, spec_name="FaultSpec", spec_module_path=MODULE, **settings)


def audited(outcome: str, tier: str | None = None) -> float:
    tiers = {} if tier is None else {"tier": tier}
    return count("vllm:kvtier_audits_total", outcome=outcome, **tiers)


class Found:
    """Differences since it was made: their number, and the log's lines on them."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._before = audited("different")
        self._capfd = capfd
        self._text = ""

    def lines(self, llm: Any, num: int = 0) -> list[tuple[str, int, int, int]]:
        """Return tier, first and worst token, and layer of each difference.

        A comparison ends some steps after its prompt, and vLLM reports the counts of a step with a
        later answer. num: differences to wait for.
        """
        found: list[Any] = []

        def have_ended() -> bool:
            run(llm, prompt(99, 20))
            self._text += "".join(self._capfd.readouterr())
            found[:] = LINE.findall(self._text)
            return len(found) >= num and len(found) == audited("different") - self._before

        wait_until(have_ended, f"{num} differences are reported")
        return [(tier, int(first), int(worst), int(layer)) for tier, first, worst, layer in found]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "config"),
    [("swapped", faulty), ("swapped", faulty_spec), ("last token", faulty), ("early", faulty)],
)
def test_what_was_stored_wrong_is_found(
    fault: str, config: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FAULT, fault)
    some, num_blocks = prompt(7000, 4 * BLOCK + 50), 4
    with engine(config()) as llm:
        run(llm, prompt(98, 20))  # the ranks report their slots with the first step
        found = Found(capfd)
        assert run(llm, some)[0][0] == 0
        reset(llm)
        cached = run(llm, some)[0][0]
        assert cached < num_blocks * BLOCK, "a part is computed"
        ((tier, first, worst, _),) = found.lines(llm, 1)
        assert (tier, first) == ("host", cached)
        if fault == "last token":
            assert worst % BLOCK == BLOCK - 1
        reset(llm)
        assert run(llm, some)[0][0] == 0, "nothing that was stored before is used"
        reset(llm)
        run(llm, some)
        assert len(found.lines(llm, 2)) == 2, "and what was stored since is wrong, too"
        reset(llm)
        for _ in range(2):
            assert run(llm, some)[0][0] == 0, "nothing is kept after a second difference"
            reset(llm)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("two_cores")
def test_one_ranks_shard_of_another_block_is_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FAULT, "shard")
    some = prompt(7100, 4 * BLOCK + 50)
    with engine(faulty(), tensor_parallel_size=2) as llm:
        found = Found(capfd)
        run(llm, some)
        reset(llm)
        run(llm, some)
        assert len(found.lines(llm, 1)) == 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "changes"),
    [("names", {"hf_overrides": {"rope_parameters": ROPE}}), ("attention", {})],
    ids=["rope", "attention"],
)
def test_kv_of_another_model_on_the_same_disk_is_found(
    fault: str,
    changes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    some = prompt(7200, 4 * BLOCK + 50)
    config = faulty(disk_path=str(tmp_path), disk_capacity="256MiB")
    monkeypatch.setenv(FAULT, "names")
    with engine(config) as llm:
        run(llm, some)
    monkeypatch.setenv(FAULT, fault)
    with engine(config, **changes) as llm:
        found = Found(capfd)
        run(llm, some)
        ((tier, *_),) = found.lines(llm, 1)
        assert tier == "disk"


@pytest.mark.timeout(600)
def test_kv_of_another_adapter_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FAULT, "adapter")
    one, other = (make_adapter(tmp_path / name, seed) for seed, name in enumerate("ab", 1))
    with engine(faulty(disk_path=str(tmp_path / "slab"), disk_capacity="256MiB"), **LORA) as llm:
        found = Found(capfd)
        ask(llm, one, 1)
        for _ in range(10):
            ask(llm, other, 2)
            if lines := found.lines(llm):
                break
            reset(llm)  # the first one's KV was not stored yet
        assert len(lines) == 1


def mixed(num: int, seed: int) -> list[list[Prompt]]:
    """Return batches of prompts of many lengths, half of which repeat or continue earlier ones."""
    rng, known, batches = random.Random(seed), list[list[int]](), list[list[Prompt]]()
    while num > 0:
        batch: list[Prompt] = []
        for _ in range(rng.choice((1, 1, 2, 4))):
            text = prompt(rng.randrange(1 << 30), rng.randrange(1, 6 * BLOCK))["prompt_token_ids"]
            if known and rng.random() < 0.7:
                before = rng.choice(known)
                text = before[: rng.randrange(1, len(before) + 1)] + text[: rng.randrange(300)]
            known.append(text)
            batch.append({"prompt_token_ids": text})
        num -= len(batch)
        batches.append(batch)
    return batches


def serve_mixed(llm: Any, num: int, capfd: pytest.CaptureFixture[str]) -> dict[str, float]:
    """Serve mixed requests, most of them from the cache; return the audits by outcome."""
    outcomes = ("equal", "within_tolerance", "different", "skipped")
    before = {outcome: audited(outcome) for outcome in outcomes}
    found = Found(capfd)
    for number, batch in enumerate(mixed(num, seed=num)):
        run(llm, *batch)
        if number % 3 == 0:
            reset(llm)
    assert found.lines(llm) == []
    return {outcome: audited(outcome) - before[outcome] for outcome in outcomes}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_fault_nothing_differs(
    dtype: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Host memory is small, so that most of it comes from disk."""
    small = {"host_capacity": "16MiB", "eviction_policy": "lru"}
    config = own_connector(**SIZES | small, disk_path=str(tmp_path), disk_capacity="256MiB")
    with engine(config, dtype=dtype) as llm:
        for num in range(40, 60):
            outcomes = serve_mixed(llm, num, capfd)
            assert outcomes["equal"] + outcomes["within_tolerance"] > 3
            assert outcomes["different"] == 0
            if audited("equal", "disk") + audited("within_tolerance", "disk"):
                return
    raise AssertionError("nothing came from disk")


@pytest.mark.timeout(900)
def test_over_a_node_and_a_store_nothing_differs(
    tmp_path: Path, valkey: str, capfd: pytest.CaptureFixture[str]
) -> None:
    stores = {"host_capacity": "16MiB", "eviction_policy": "lru", "storage": valkey}
    with engine(connector(**SIZES | stores), dtype="bfloat16") as llm:
        outcomes = serve_mixed(llm, 40, capfd)
        assert outcomes["equal"] + outcomes["within_tolerance"] > 3
        assert outcomes["different"] == 0
    with running(tmp_path, segments=256) as node:
        config = connector(audit=1.0, node=str(node.socket), node_deadline_s=1.0)
        with engine(config, dtype="bfloat16") as llm:
            outcomes = serve_mixed(llm, 40, capfd)
            assert outcomes["equal"] + outcomes["within_tolerance"] > 3
            assert outcomes["different"] == 0
