"""A small trace in every format that can be read."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from kvtier.observe.recording import Chains, Header, LineWriter
from kvtier.tools.replay.segments import find_segments
from kvtier.tools.replay.trace import Trace, chained
from kvtier.tools.replay.traces import ReadOptions

OPTIONS = ReadOptions(Chains(b"s" * 32, block_tokens=2))


def shared(trace: Trace) -> list[int]:
    """Return the number of blocks that each request shares with an earlier one."""
    found: list[int] = find_segments(trace).num_reused.tolist()
    return found


def mooncake(at_ms: int, ids: Sequence[int], tokens: int = 1000) -> str:
    fields = {"timestamp": at_ms, "input_length": tokens, "output_length": 7, "hash_ids": list(ids)}
    return json.dumps(fields)


def bailian(at_s: float, ids: Sequence[int], chat: int) -> str:
    fields = json.loads(mooncake(0, ids, 40))
    more = {"chat_id": chat, "parent_chat_id": -1, "timestamp": at_s, "type": "text", "turn": 1}
    return json.dumps(fields | more)


def session(name: str, requests: list[list[object]], tools: int = 128, system: int = 64) -> str:
    fields = {"id": name, "models": [], "block_size": 64, "tool_tokens": tools}
    return json.dumps(fields | {"system_tokens": system, "requests": requests})


# The first request has blocks 0 to 4; the second keeps four of them; the sub-agent has its own.
REQUESTS: list[list[object]] = [
    [0.0, 330, 9, 0, 0, [0, 5], 0.0, 1.0],
    [10.0, 460, 9, 0, 4, [5, 1, 9, 2], 0.0, 1.0],
    [11.0, 140, 9, 1, 0, [20, 2], 0.0, 1.0],
]


VLLM = """\
(APIServer pid=7) INFO 11-22 09:00:01 [api_server.py:12] Starting
(APIServer pid=7) INFO 11-22 09:00:02 [logger.py:39] Received request cmpl-1: \
prompt: 'prompt_token_ids: [9]', params: SamplingParams(n=1), prompt_token_ids: [1, 2, 3, 4, 5], \
prompt_embeds shape: None, lora_request: None.
DEBUG 11-22 09:00:04 [logger.py:39] Request cmpl-2 details: prompt: None, \
prompt_token_ids: [1, 2, 3, 9], prompt_embeds shape: None.
""".splitlines()
SGLANG = """\
[2026-11-22 09:00:00] server_args=ServerArgs(model_path='m')
[2026-11-22 09:00:02] Receive: obj=GenerateReqInput(rid='a', text=None, \
input_ids=[1, 2, 3, 4, 5], sampling_params={'max_new_tokens': 4}, stop=[], modalities=[])
[2026-11-22 09:00:03] Finish: obj=GenerateReqInput(rid='a', input_ids=[1, 2, 3, 4]), out={}
[2026-11-22 09:00:04] Receive: obj=GenerateReqInput(rid='b', text=None, input_ids=[1, 2, 3, 9])
""".splitlines()
SGLANG_JSON = [
    "[2026-11-22 09:00:0{}] {}".format(
        second,
        json.dumps({"timestamp": "x", "event": event, "rid": "a", "obj": {"input_ids": ids}}),
    )
    for second, event, ids in (
        (2, "request.received", [1, 2, 3, 4, 5]),
        (3, "request.finished", [1, 2, 3, 4, 5]),
        (4, "request.received", [1, 2, 3, 9]),
    )
]


def recording(*chains: Sequence[int], started: float = 1e9, salt: str = "x") -> list[str]:
    writer = LineWriter()
    lines = [Header(64, salt, started).line().rstrip("\n")]
    for at, ids in enumerate(chains):
        keys = chained(np.array(ids, np.uint64))
        lines.append(writer.line(float(at), 64 * len(ids), 3, keys).rstrip("\n"))
    return lines


HEADER = recording()[0]


SAMPLES = [
    mooncake(0, [1, 2]),
    bailian(0, [1, 2], 1),
    session("a", REQUESTS),
    VLLM[1],
    SGLANG[1],
    SGLANG_JSON[0],
    "\n".join(recording([1, 2], [1, 3])),
]
