"""Nodes and engines that are killed and stopped, for ``test_kills``.

One interpreter forks them all, since starting one takes long: ``node`` or ``engine SEED`` on stdin
forks a process, whose number is printed. An engine stores and loads blocks without end, checks
every byte, and writes what it finds to its log.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from kvtier.core.types import BlockName
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import opaque
from kvtier.node.client import tier as tier_module
from kvtier.node.client.channel import NodeClient
from kvtier.node.client.tier import GRACE_S, NodeTier
from kvtier.node.server.node import CacheNode
from kvtier.node.server.server import NodeServer
from kvtier.testing.storage_user import NAMESPACE, Scattered, stored_bytes, stored_key
from kvtier.tiers import Outcome, StorageSite, breaker
from tests.node.harness import config_of

BLOCK = 128 << 10
NUM_SLOTS = 16
NUM_KEYS = 32
TIMEOUT_S = 0.5
SLACK_S = 20.0
"""Delays by a busy machine. A call without a deadline could wait longer, for a stopped node."""
OPTIONS = {"host_capacity": "2MiB", "segment_capacity": "512KiB"}

THERE, ABSENT, _, FAILED = Outcome


def run_node(folder: Path) -> None:
    config = config_of(folder, **OPTIONS)
    node = CacheNode(config, CpuDevice())
    asyncio.run(NodeServer(node, config.socket).serve())


def run_engine(folder: Path, seed: int) -> None:
    tier_module.ANSWER_S = TIMEOUT_S  # on a busy machine
    vars(breaker).update(FIRST_PAUSE_S=0.02, LONGEST_PAUSE_S=0.1)  # more happens in less time
    rng = random.Random(seed)
    resumed: list[int] = []
    signal.signal(signal.SIGCONT, lambda *_: resumed.append(1))
    log = os.open(folder / f"engine-{seed}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    site = StorageSite("", "node", opaque(BLOCK), NUM_SLOTS * BLOCK)
    tier = NodeTier(site, NodeClient(folder / "node.sock"))
    memory = Scattered(4, [BLOCK // 2, BLOCK // 2])
    right = {stored_key(at): stored_bytes(stored_key(at), BLOCK) for at in range(NUM_KEYS)}
    counts: Counter[str] = Counter()
    while True:
        numbers = rng.sample(range(NUM_KEYS), rng.randint(1, 4))
        chosen = [stored_key(number) for number in numbers]
        pieces = memory.pieces.pick(list(range(len(numbers))))
        resumed.clear()
        is_put = rng.random() < 0.4
        if is_put:
            for at, key in enumerate(chosen):
                memory.write(at, right[key])
        began_s = time.monotonic()
        if is_put:
            names = [BlockName(NAMESPACE, at, key) for at, key in enumerate(chosen)]
            outcomes = tier.put(names, pieces, TIMEOUT_S)
        else:
            outcomes = tier.get(chosen, pieces, TIMEOUT_S)
        took_s = time.monotonic() - began_s
        if took_s > TIMEOUT_S + GRACE_S + SLACK_S and not resumed:
            os.write(log, b"late %f\n" % took_s)
        for at, (key, outcome) in enumerate(zip(chosen, outcomes, strict=True)):
            counts[f"{'put' if is_put else 'get'} {outcome.value}"] += 1
            if not is_put and outcome is THERE and memory.read(at) != right[key]:
                os.write(log, b"wrong %d\n" % numbers[at])
        if FAILED in outcomes:
            time.sleep(0.01)
        os.write(log, "".join(f"{name}: {num}\n" for name, num in counts.items()).encode())
        counts.clear()


def main() -> None:
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for them
    print("ready", flush=True)
    for line in sys.stdin:
        kind, *words = line.split()
        child = os.fork()
        if child == 0:
            try:
                os.close(0)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if kind == "node":
                    run_node(folder)
                else:
                    run_engine(folder, int(words[0]))
            except BaseException:
                (folder / f"broken-{os.getpid()}.log").write_text(traceback.format_exc())
            finally:
                os._exit(1)
        print(child, flush=True)


if __name__ == "__main__":
    main()
