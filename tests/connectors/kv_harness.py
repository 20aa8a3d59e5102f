"""Both halves of ``KvtierConnector`` without vLLM: real copies between tensors and host memory.

Requests, steps and pages have the form that vLLM's scheduler passes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import reduce
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import torch

from kvtier.cache.transfer.ranks import RankMover
from kvtier.connectors.vllm.kv_connector.messages import RankMessage, StepMessage
from kvtier.connectors.vllm.kv_connector.rank import RankHalf
from kvtier.connectors.vllm.kv_connector.scheduler import SchedulerHalf
from kvtier.connectors.vllm.shared.manager import TierManager
from kvtier.connectors.vllm.shared.names import EngineFacts, GroupFacts, VllmNames
from kvtier.connectors.vllm.shared.pages import LayerSize, tell_pages
from kvtier.connectors.vllm.shared.prompt import Shape
from kvtier.connectors.vllm.shared.reach import WHOLE, GroupReach
from kvtier.connectors.vllm.shared.step import DueRequests
from kvtier.connectors.vllm.shared.tiers import node_tiers, rank_tiers
from kvtier.connectors.vllm.shared.worker import RankLimits, TierWorker
from kvtier.core.types import DEVICE, HOST, CacheMode, LoadPolicy
from kvtier.devices import find_device
from kvtier.node.client.channel import NodeClient

PAGE = 4
"""Tokens of a page."""
NUM_PAGES = 24
LAYERS = ("a", "b")
SHAPE = (2, NUM_PAGES, PAGE, 1, 8)
"""All keys of a layer, then all its values; one byte for each number."""
PAGE_BYTES = 2 * PAGE * 8
SLOT_BYTES = 4096


class KvHarness:
    """A scheduler and its ranks.

    num: pages per block. replicated: all ranks compute the same KV, and map the same host memory.
    node: socket of a node that has the memory. mode: whether requests load, and store. audit: share
    of hits that are audited; its KV is of numbers of 8 bits then. reaches: of each KV group.
    """

    def __init__(
        self,
        num_ranks: int = 1,
        num: int = 1,
        num_slots: int = 16,
        replicated: bool = False,
        node: Path | None = None,
        mode: CacheMode = CacheMode.BOTH,
        audit: float = 0.0,
        reaches: Sequence[GroupReach] = (WHOLE,),
    ) -> None:
        self.num = num
        names_of = [tuple(f"{name}{at or ''}" for name in LAYERS) for at in range(len(reaches))]
        facts = EngineFacts(
            tuple(GroupFacts(at, PAGE, names_of[at], reach) for at, reach in enumerate(reaches)),
            len(LAYERS) * PAGE_BYTES,
            num,
            PAGE,
            "fp8" if audit else "uint8",
            num_ranks=num_ranks,
            is_replicated=replicated,
        )
        num_shards = facts.num_shards
        mover = RankMover({}, SLOT_BYTES, num_ranks, num_shards, device=DEVICE)
        names = VllmNames(facts, SLOT_BYTES, "vllm")
        shape = Shape((PAGE * num,) * len(reaches), SLOT_BYTES, num_shards)
        clients: list[NodeClient | None] = [None] * num_ranks
        if node is None:
            tiers = rank_tiers(mover, {HOST: num_slots}, names, shape)
        else:
            names.settle([])
            engine = uuid4().hex
            tiers = node_tiers(NodeClient(node, engine=engine), names, shape, deadline_s=5.0)
            clients = [NodeClient(node, engine=engine) for _ in clients]
        manager = TierManager(
            tiers,
            mover,
            names,
            shape,
            LoadPolicy.ALWAYS,
            publishes_events=True,
            mode=mode,
            audit=audit,
        )
        self.half = SchedulerHalf(manager, facts, DueRequests())
        self.caches = [
            {name: torch.zeros(SHAPE, dtype=torch.uint8) for each in names_of for name in each}
            for _ in range(num_ranks)
        ]
        layers = [[LayerSize(name, [PAGE_BYTES]) for name in each] for each in names_of]
        self.ranks = []
        for rank, caches in enumerate(self.caches):
            pages = tell_pages(caches, layers, NUM_PAGES)
            shared = Path(f"/dev/shm/kvtier-test-{os.getpid()}") if replicated else None
            room = RankLimits(
                SLOT_BYTES, num_slots, shared=shared, num_shards=num_shards, node=clients[rank]
            )
            worker = TierWorker(pages, find_device("cpu"), room, num, rank)
            if audit:
                worker.audit(caches, layers, facts)
            self.ranks.append(RankHalf(worker, pages, stores=rank < num_shards))
        self.stored: set[str] = set()
        self.loaded: set[str] = set()
        self.failed: set[int] = set()
        self.step()

    def close(self) -> None:
        self.half.manager.shutdown()
        for rank in self.ranks:
            rank.shutdown()

    # -- what vLLM's scheduler does ----------------------------------------------------------------

    def request(self, name: str, text: str, **changes: object) -> Any:
        """Return a request for a prompt, with a token per character."""
        ends = range(PAGE, len(text) + 1, PAGE)
        hashes = [blake2b(text[:end].encode(), digest_size=32).digest() for end in ends]
        made: dict[str, object] = {
            "request_id": name,
            "kv_transfer_params": None,
            "block_hashes": hashes,
            "num_tokens": len(text),
            "num_prompt_tokens": len(text),
            "num_computed_tokens": 0,
            "skip_reading_prefix_cache": False,
        }
        return SimpleNamespace(**made | changes)

    def asks(self, request: Any, num_computed: int = 0) -> int | None:
        return self.half.num_to_load(self.half.begin(request), num_computed)

    def gets_pages(
        self, request: Any, pages: Sequence[int], num_external: int = 0, *others: Sequence[int]
    ) -> None:
        """Note a request's pages. others: those in further KV groups."""
        blocks: Any = SimpleNamespace(get_block_ids=lambda: (list(pages), *map(list, others)))
        self.half.on_pages(self.half.begin(request), blocks, num_external)

    def message(self, *scheduled: tuple[Any, Sequence[int], int], **more: Any) -> StepMessage:
        """Return the message of a step. scheduled: new requests, their pages, and new tokens."""
        num_tokens = {each.request_id: num for each, _, num in scheduled}
        num_tokens |= more.pop("num_scheduled", {})
        output: Any = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.request_id,
                    block_ids=(list(pages),),
                    num_computed_tokens=request.num_computed_tokens,
                )
                for request, pages, _ in scheduled
            ],
            scheduled_cached_reqs=more.pop("cached", NOTHING_CACHED),
            num_scheduled_tokens=num_tokens,
            total_num_scheduled_tokens=sum(num_tokens.values()),
            scheduled_spec_decode_tokens={},
            preempted_req_ids=more.pop("preempted", None),
            **more,
        )
        return self.half.take_step(output)

    def run(self, message: StepMessage, ends: bool = True) -> None:
        """Carry a message out on all ranks. ends: wait for its copies, and report."""
        for rank in self.ranks:
            rank.begin_step(message)
            rank.end_step()
        if ends:
            self.hear()

    def hear(self, *ranks: RankHalf) -> None:
        """Wait for the copies of ranks, by default all, and process their messages."""
        messages: list[RankMessage] = []
        for rank in ranks or self.ranks:
            rank.worker.wait(set(rank.worker.job_ids))
            stored, loaded = rank.take_finished()
            self.stored |= stored
            self.loaded |= loaded
            jobs = rank.take_failed()
            self.failed.update(page for job in jobs for part in job.pages for page in part.pages)
            said = rank.take_message()
            messages += [] if said is None else [said]
        if messages:
            self.half.hear(reduce(RankMessage.and_also, messages))

    def step(self, *scheduled: tuple[Any, Sequence[int], int], **more: Any) -> None:
        self.run(self.message(*scheduled, **more))

    # -- bytes -------------------------------------------------------------------------------------

    def fill(self, pages: Sequence[int], seed: int) -> None:
        """Write different bytes to each page, layer, part and rank."""
        random = torch.Generator().manual_seed(seed)
        for caches in self.caches:
            for cache in caches.values():
                for page in pages:
                    some = torch.randint(0, 256, SHAPE[:1] + SHAPE[2:], generator=random)
                    cache[:, page] = some.to(torch.uint8)

    def bytes_of(self, pages: Sequence[int]) -> list[torch.Tensor]:
        return [
            cache[:, list(pages)].clone() for caches in self.caches for cache in caches.values()
        ]

    def begin(self, name: str, text: str, pages: Sequence[int]) -> Any:
        """Compute a prompt in one step. Its stores are in flight."""
        request = self.request(name, text)
        self.asks(request)
        self.run(self.message((request, pages, len(text))), ends=False)
        return request

    def load(self, name: str, text: str, pages: Sequence[int]) -> None:
        """Load all blocks of a prompt that is one token longer than ``text``."""
        request = self.request(name, text + "s")
        assert self.asks(request) == len(text)
        self.gets_pages(request, pages, len(text))
        self.step()

    def serve(self, name: str, text: str, pages: Sequence[int], **changes: object) -> Any:
        """Compute, store and finish a request in one step."""
        request = self.request(name, text, **changes)
        assert self.asks(request) == 0
        self.gets_pages(request, pages)
        self.step((request, pages, len(text)))
        request.num_computed_tokens = len(text)
        return request


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*each) for each in zip(one, other, strict=True))


NOTHING_CACHED: Any = SimpleNamespace(
    req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
)
