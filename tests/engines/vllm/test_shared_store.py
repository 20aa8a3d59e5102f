"""Two real vLLM engines on the CPU that share a store."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.vllm.engines import BLOCK, Answers, connector, engine, loaded, one_by_one, prompt
from tests.kit.proxy import Proxy
from tests.kit.servers import ValkeyServer

# 50 tokens beyond the last full block: hits on the device and from the store are computed from the
# same boundary.
PROMPTS = [prompt(seed, 6 * BLOCK + 50) for seed in range(3)]
NUM_BLOCKS = 6 * len(PROMPTS)


@pytest.mark.timeout(600)
def test_engine_loads_what_another_has_computed(alone: Answers, valkey: str) -> None:
    config = connector(host_capacity="256MiB", storage=valkey, lookup_deadline_s=5)
    with engine(config) as first:
        assert one_by_one(first, PROMPTS) == alone["cold"]
        with engine(config) as second:
            before = loaded("valkey"), loaded("host")
            assert one_by_one(second, PROMPTS) == alone["warm"]
            assert loaded("valkey") - before[0] == NUM_BLOCKS
            assert second.reset_prefix_cache()
            assert one_by_one(second, PROMPTS) == alone["warm"]
            assert loaded("valkey") - before[0] == NUM_BLOCKS
            assert loaded("host") - before[1] == NUM_BLOCKS, "it is in host memory by then"


@pytest.mark.timeout(600)
def test_store_that_is_gone_is_no_reason_to_stop(alone: Answers, server: ValkeyServer) -> None:
    proxy = Proxy(server.port)
    config = connector(host_capacity="256MiB", storage=f"valkey://127.0.0.1:{proxy.port}")
    with engine(config) as llm:
        proxy.hold()
        assert one_by_one(llm, PROMPTS[:2]) == alone["cold"][:2]
        proxy.release()
        proxy.close()
        assert one_by_one(llm, PROMPTS[2:]) == alone["cold"][2:]
        assert llm.reset_prefix_cache()
        assert one_by_one(llm, PROMPTS) == alone["warm"]


def until_stored(llm: Any, server: ValkeyServer, num: int) -> None:
    """Send prompts until all blocks are stored: vLLM handles stores only in its steps."""
    for seed in range(100, 160):
        if server.num_values >= num:
            return
        one_by_one(llm, [prompt(seed, 20)])
    pytest.fail(f"{server.num_values} of {num} blocks are in the store")


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("two_cores")
def test_two_ranks_load_the_shards_that_two_others_have_stored(
    server: ValkeyServer, valkey: str
) -> None:
    """Each rank has half of the heads, under a key of its own; the scheduler decides for both."""
    config = connector(host_capacity="256MiB", storage=valkey, lookup_deadline_s=5)
    with engine(config, tensor_parallel_size=2) as first:
        one_by_one(first, PROMPTS)
        on_device = one_by_one(first, PROMPTS)
        assert [cached for cached, _ in on_device] == [6 * BLOCK] * len(PROMPTS)
        until_stored(first, server, 2 * NUM_BLOCKS)
    with engine(config, tensor_parallel_size=2) as second:
        before = loaded("valkey")
        assert one_by_one(second, PROMPTS) == on_device
        assert loaded("valkey") - before == NUM_BLOCKS
