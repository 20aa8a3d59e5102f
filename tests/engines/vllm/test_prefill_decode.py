"""A prefill and a decode server: real vLLM servers with a core each, and kvtier beside NIXL.

NIXL's pages go by UCX over TCP. A decode server computes the last token only, behind pages that
NIXL brings, so bits are compared with those of the same two servers without kvtier, and answers
with those of a vLLM without connectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvtier.connectors.vllm.shared.fronts import OFFLOADING
from tests.engines.vllm.engines import (
    BLOCK,
    Answer,
    Answers,
    Connects,
    are_close,
    connector,
    own_connector,
    prompt,
)
from tests.engines.vllm.servers import (
    NIXL,
    PrefillDecode,
    Reply,
    VllmServer,
    over_nixl,
    prefill_decode,
)
from tests.kit.nodes import running
from tests.kit.waiting import wait_until

needs_nixl = pytest.mark.skipif(not find_spec("nixl"), reason="no NIXL: make test-vllm")
PROMPTS = [prompt(seed, 6 * BLOCK + 50) for seed in range(14)]
TOKENS = [some["prompt_token_ids"] for some in PROMPTS]
HIT = 6 * BLOCK
"""Tokens of the full blocks of a prompt."""
FEW = 3
CONNECTS = [own_connector] if OFFLOADING.contract.differences() else [own_connector, connector]
LOADED = "vllm:kvtier_loaded_chunks_total"


def _settings(folder: Path) -> dict[str, Any]:
    return {"host_capacity": "256MiB", "disk_path": str(folder), "disk_capacity": "256MiB"}


def _orders(ours: dict[str, Any], is_first: bool) -> dict[str, Any]:
    return over_nixl(ours, NIXL) if is_first else over_nixl(NIXL, ours)


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory, alone: Answers) -> dict[str, list[Answer]]:
    """Return the decode server's answers without kvtier, as ``alone``: "warm" is from P's pool."""
    with prefill_decode(tmp_path_factory.mktemp("without"), NIXL, NIXL) as pair:
        cold = [pair.ask(tokens)[1] for tokens in TOKENS[:FEW]]
        pair.decode.reset_pool()
        warm = [pair.ask(tokens)[1] for tokens in TOKENS[:FEW]]
    for some, state in ((cold, "cold"), (warm, "warm")):
        assert all(map(are_close, _answers(some), _answers(alone[state])))
    return {"cold": _answers(cold), "warm": _answers(warm)}


def _answers(found: Iterable[Reply] | Iterable[tuple[int, Answer]]) -> list[Answer]:
    return [one.answer if isinstance(one, Reply) else one[1] for one in found]


def _until_on_disk(pair: PrefillDecode, num: int) -> None:
    """Wait until the decode server has so many blocks on its disk. Statistics come with steps."""

    def are_there() -> bool:
        pair.decode.ask([1, 2, 3], max_tokens=1)
        return pair.decode.metric("vllm:kvtier_used_chunks", tier="disk") >= num

    wait_until(are_there, f"{num} blocks are on disk")


def _once_loaded(
    ask: Callable[[list[int]], tuple[Reply, ...]],
    tokens: list[int],
    loads: VllmServer,
    saves: VllmServer,
) -> tuple[Reply, ...]:
    """Return the answers to a prompt, once the first of them was loaded from a store or a node.

    Stores end with a step of the server that saves. A block that was missing is not looked up again
    for seconds, and an answer that is late serves the next request.
    """
    found: list[tuple[Reply, ...]] = []

    def is_loaded() -> bool:
        saves.ask([1, 2, 3], max_tokens=1)
        saves.reset_pool()
        loads.reset_pool()
        found.append(ask(tokens))
        return found[-1][0].num_cached == HIT

    wait_until(is_loaded, "the prompt was loaded")
    return found[-1]


@needs_nixl
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_first", [False, True], ids=["after_nixl", "before_nixl"])
@pytest.mark.parametrize("connects", CONNECTS)
def test_both_servers_keep_what_they_compute_and_receive_and_survive_each_other(
    alone: Answers,
    without: dict[str, list[Answer]],
    tmp_path: Path,
    connects: Connects,
    is_first: bool,
) -> None:
    warm = _answers(alone["warm"])
    prefill, decode = (
        _orders(connects(**_settings(tmp_path / side)), is_first) for side in ("disk-p", "disk-d")
    )
    with prefill_decode(tmp_path, prefill, decode) as pair:
        replies = [pair.ask(tokens) for tokens in TOKENS[:FEW]]
        assert _answers(decoded for _, decoded in replies) == without["cold"]
        pair.reset_pools()
        replies = [pair.ask(tokens) for tokens in TOKENS[:FEW]]
        assert [prefilled.num_cached for prefilled, _ in replies] == [HIT] * FEW
        assert _answers(decoded for _, decoded in replies) == without["warm"]
        assert pair.decode.metric(LOADED) == 0, "the transfer was left to NIXL"
        pair.reset_pools()
        direct = [pair.decode.ask(tokens) for tokens in TOKENS[:FEW]]
        assert [reply.num_cached for reply in direct] == [HIT] * FEW, "what arrived was stored"
        assert all(map(are_close, _answers(direct), warm))
        pair.reset_pools()
        together = pair.at_once(TOKENS)
        assert all(map(are_close, _answers(together), _answers(alone["cold"])))
        _until_on_disk(pair, 6 * len(TOKENS))
        pair.reset_pools()

        pair.prefill_only(TOKENS[0])
        assert not pair.prefill.has_reset_pool(), "its pages wait for the decode server"
        pair.decode.kill()
        pair.prefill.reset_pool()  # after their time
        pair.decode.start()
        pair.decode.wait()
        restarted = pair.decode.ask(TOKENS[1])
        assert restarted.num_cached == HIT, "from its disk"
        assert are_close(restarted.answer, warm[1])

        held = pair.prefill_only(TOKENS[0])
        other = prompt(99, HIT + 50)["prompt_token_ids"]
        unknown = pair.prefill_only(other)
        pair.prefill.kill()
        late = pair.decode.ask(TOKENS[0], kv_transfer_params=held.transfer)
        assert are_close(late.answer, warm[0])
        computed = pair.decode.ask(other, kv_transfer_params=unknown.transfer)
        assert computed.answer[0][:1] == unknown.answer[0]
        pair.decode.reset_pool()


@needs_nixl
@pytest.mark.timeout(1800)
def test_a_decode_server_alone_keeps_what_it_receives(
    alone: Answers, without: dict[str, list[Answer]], tmp_path: Path
) -> None:
    decode = over_nixl(NIXL, own_connector(**_settings(tmp_path / "disk")))
    # KvtierConnector turns this off, and NIXL refuses a server that has it on.
    alike = ["--disable-hybrid-kv-cache-manager"]
    with prefill_decode(tmp_path, NIXL, decode, prefill_options=alike) as pair:
        replies = [pair.ask(tokens) for tokens in TOKENS[:FEW]]
        assert _answers(decoded for _, decoded in replies) == without["cold"]
        pair.reset_pools()
        direct = [pair.decode.ask(tokens) for tokens in TOKENS[:FEW]]
        assert [reply.num_cached for reply in direct] == [HIT] * FEW
        assert all(map(are_close, _answers(direct), _answers(alone["warm"])))
        pair.prefill.reset_pool()


@needs_nixl
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("connects", CONNECTS)
def test_a_prefill_server_loads_what_a_decode_server_saves(
    without: dict[str, list[Answer]],
    tmp_path: Path,
    connects: Connects,
    valkey: str,
) -> None:
    """The prefill server stores nothing, and the decode server loads nothing."""
    shared = {"host_capacity": "256MiB", "storage": valkey, "lookup_deadline_s": 5}
    loads = connects(**shared, mode="load_only")
    saves = connects(**shared, mode="save_only")
    with prefill_decode(tmp_path, over_nixl(NIXL, loads), over_nixl(NIXL, saves)) as pair:
        replies = [pair.ask(tokens) for tokens in TOKENS[:FEW]]
        assert _answers(decoded for _, decoded in replies) == without["cold"]
        loaded = [
            _once_loaded(pair.ask, tokens, pair.prefill, pair.decode) for tokens in TOKENS[:FEW]
        ]
        assert _answers(decoded for _, decoded in loaded) == without["warm"]
        pair.decode.reset_pool()
        assert pair.decode.ask(TOKENS[0]).num_cached == 0


@pytest.fixture(params=["valkey", "node"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Yield the settings of a store, or of a node, that both servers use."""
    if request.param == "valkey":
        url = request.getfixturevalue("valkey")
        yield {"host_capacity": "256MiB", "storage": url, "lookup_deadline_s": 5}
    else:
        (tmp_path / "node").mkdir()
        with running(tmp_path / "node", segments=256) as node:
            yield {"node": str(node.socket), "node_deadline_s": 1.0, "lookup_deadline_s": 5}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("connects", CONNECTS)
def test_kvtier_is_the_only_medium_between_two_servers(
    alone: Answers, tmp_path: Path, connects: Connects, medium: dict[str, Any]
) -> None:
    cold, warm = alone["cold"][:FEW], alone["warm"][:FEW]
    saves, loads = (connects(**medium, mode=mode) for mode in ("save_only", "load_only"))
    with prefill_decode(tmp_path, saves, loads) as pair:
        replies = [pair.prefill.ask(tokens) for tokens in TOKENS[:FEW]]
        assert _answers(replies) == _answers(cold)

        def decode(tokens: list[int]) -> tuple[Reply, ...]:
            # Again: an engine's first prompt is not stored if the node opens its room late.
            pair.prefill.ask(tokens, max_tokens=1)
            return (pair.decode.ask(tokens),)

        loaded = [
            _once_loaded(decode, tokens, pair.decode, pair.prefill) for tokens in TOKENS[:FEW]
        ]
        assert _answers(reply for (reply,) in loaded) == _answers(warm)
        pair.prefill.reset_pool()
        assert pair.prefill.ask(TOKENS[0]).num_cached == 0, "it loads nothing"


SLOW = {
    "kv_connector": "SlowConnector",
    "kv_connector_module_path": "tests.engines.vllm.faulty_connector",
}


@needs_nixl
@pytest.mark.timeout(1800)
def test_pages_are_held_until_they_are_sent_and_stored(alone: Answers, tmp_path: Path) -> None:
    """Stores last longer than the transfer of a prompt, in a pool that has room for two."""
    slow = own_connector(host_capacity="256MiB") | SLOW
    small = ["--num-gpu-blocks-override=17", "--max-model-len=2048"]
    # KvtierConnector turns this off, and NIXL refuses a server that has it on.
    alike = ["--disable-hybrid-kv-cache-manager"]
    options = {"prefill_options": small, "decode_options": alike}
    with prefill_decode(tmp_path, over_nixl(NIXL, slow), NIXL, **options) as pair:
        decoded = pair.at_once(TOKENS[:6])
        assert all(map(are_close, _answers(decoded), _answers(alone["cold"])))
        pair.reset_pools()
        replies = [pair.ask(tokens) for tokens in TOKENS[:6]]
        assert [prefilled.num_cached for prefilled, _ in replies] == [HIT] * 6
        decoded = [reply for _, reply in replies]
        assert all(map(are_close, _answers(decoded), _answers(alone["warm"])))
        pair.reset_pools()
