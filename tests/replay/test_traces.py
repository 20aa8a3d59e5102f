"""Readers: each format by a sample made by hand, and what is wrong by file and line."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.recording import Chains, Header, LineWriter
from kvtier.replay.segments import find_segments
from kvtier.replay.trace import Trace, chained
from kvtier.replay.traces import ReadOptions, read_traces

OPTIONS = ReadOptions(Chains(b"s" * 32, block_tokens=2))


def mooncake(at_ms: int, ids: Sequence[int], tokens: int = 1000) -> str:
    fields = {"timestamp": at_ms, "input_length": tokens, "output_length": 7, "hash_ids": list(ids)}
    return json.dumps(fields)


def bailian(at_s: float, ids: Sequence[int], chat: int) -> str:
    fields = json.loads(mooncake(0, ids, 40))
    more = {"chat_id": chat, "parent_chat_id": -1, "timestamp": at_s, "type": "text", "turn": 1}
    return json.dumps(fields | more)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Trace]:
    def reading(*lines: str, options: ReadOptions = OPTIONS, name: str = "trace.jsonl") -> Trace:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return read_traces([path], options)

    return reading


def shared(trace: Trace) -> list[int]:
    """Blocks that each request shares with an earlier one."""
    segments = find_segments(trace)
    found: list[int] = segments.per_request(
        np.where(segments.is_reuse, segments.length, 0)
    ).tolist()
    return found


def test_mooncake(read: Callable[..., Trace]) -> None:
    trace = read(mooncake(2500, [1, 2, 4]), "", mooncake(500, [1, 2, 3]), mooncake(2500, [4, 2]))
    assert trace.times.tolist() == [0.0, 2.0, 2.0]
    assert trace.lengths.tolist() == [3, 3, 2]
    assert trace.block_tokens == 512
    assert trace.input_tokens.tolist() == [1000] * 3
    assert trace.output_tokens.tolist() == [7] * 3
    assert shared(trace) == [0, 2, 0]  # the last one's 2 has another parent


def test_bailian(read: Callable[..., Trace]) -> None:
    trace = read(bailian(1.25, [5, 6, 7], chat=1), bailian(2.0, [5, 6, 8], chat=2))
    assert trace.times.tolist() == [0.0, 0.75]
    assert trace.block_tokens == 16
    assert shared(trace) == [0, 2]


def test_blocks_of_another_size_and_coarser_ones(read: Callable[..., Trace]) -> None:
    lines = [mooncake(0, [1, 2, 3, 4, 5]), mooncake(1, [1, 2, 3, 9, 5])]
    trace = read(*lines, options=ReadOptions(OPTIONS.chains, block_tokens=100, coarsen=2))
    assert trace.block_tokens == 200
    assert trace.lengths.tolist() == [2, 2]
    assert shared(trace) == [0, 1]


def session(name: str, requests: list[list[object]], tools: int = 128, system: int = 64) -> str:
    fields = {"id": name, "models": [], "block_size": 64, "tool_tokens": tools}
    return json.dumps(fields | {"system_tokens": system, "requests": requests})


def agentic(*, hours: float = 1.0, sessions: int = 0, shared_prefix: bool = True) -> ReadOptions:
    chains = OPTIONS.chains
    return ReadOptions(chains, hours=hours, sessions=sessions, shared_prefix=shared_prefix)


# The first request has blocks 0 to 4; the second keeps four of them; the sub-agent has its own.
REQUESTS: list[list[object]] = [
    [0.0, 330, 9, 0, 0, [0, 5], 0.0, 1.0],
    [10.0, 460, 9, 0, 4, [5, 1, 9, 2], 0.0, 1.0],
    [11.0, 140, 9, 1, 0, [20, 2], 0.0, 1.0],
]


def test_agentic_sessions(read: Callable[..., Trace]) -> None:
    trace = read(session("a", REQUESTS), options=agentic())
    assert trace.lengths.tolist() == [5, 7, 2]
    assert trace.input_tokens.tolist() == [330, 460, 140]
    assert trace.times.tolist() == pytest.approx([0, 10, 11])
    assert shared(trace) == [0, 4, 0]
    assert "1 sessions have no start of their own" in trace.notes[0]


def test_sessions_share_tools_and_system_prompt_of_equal_lengths(
    read: Callable[..., Trace],
) -> None:
    lines = [session("a", REQUESTS), session("b", REQUESTS), session("c", REQUESTS, tools=192)]
    # 192 tokens of tools and system prompt are three blocks of 64, of two sessions out of three.
    trace = read(*lines, options=agentic())
    assert sum(shared(trace)) == 3 * 4 + 3
    assert sum(shared(read(*lines, options=agentic(shared_prefix=False)))) == 3 * 4


def test_the_same_seed_draws_the_same_starts(read: Callable[..., Trace]) -> None:
    lines = [session(str(at), REQUESTS) for at in range(5)]
    one, two = read(*lines, options=agentic()), read(*lines, options=agentic())
    assert one.times.tolist() == two.times.tolist()
    assert read(*lines, options=agentic(sessions=2)).num_requests == 2 * len(REQUESTS)
    assert one.window_s <= 3600 + 11


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


@pytest.mark.parametrize("lines", [VLLM, SGLANG, SGLANG_JSON])
def test_request_logs(read: Callable[..., Trace], lines: list[str]) -> None:
    trace = read(*lines)
    assert trace.times.tolist() == [0.0, 2.0]
    assert trace.input_tokens.tolist() == [5, 4]
    assert trace.lengths.tolist() == [2, 2]  # whole blocks of two tokens
    assert shared(trace) == [0, 1]


def test_another_salt_gives_other_keys_and_the_same_hits(read: Callable[..., Trace]) -> None:
    ours = read(*VLLM)
    other = read(*VLLM, options=ReadOptions(Chains(b"t" * 32, block_tokens=2)))
    assert not set(ours.keys.tolist()) & set(other.keys.tolist())
    assert shared(ours) == shared(other)


def recording(*chains: Sequence[int], started: float = 1e9, salt: str = "x") -> list[str]:
    writer = LineWriter()
    lines = [Header(64, salt, started).line().rstrip("\n")]
    for at, ids in enumerate(chains):
        keys = chained(np.array(ids, np.uint64))
        lines.append(writer.line(float(at), 64 * len(ids), 3, keys).rstrip("\n"))
    return lines


def test_recording(read: Callable[..., Trace]) -> None:
    lines = recording([1, 2, 3], [1, 2, 4], [], [1, 2, 4, 5])
    trace = read(*lines, *recording([1, 2, 3], started=1e9 + 60))
    assert trace.times.tolist() == [0, 1, 2, 3, 60]
    assert trace.lengths.tolist() == [3, 3, 0, 4, 3]
    assert shared(trace) == [0, 2, 0, 3, 3]
    # What is known of a prefix is not written again.
    assert len(lines[4]) < len(lines[1])


def test_recording_that_a_crash_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    whole = "\n".join(recording([1, 2], [1, 2, 3])) + "\n"
    path.write_text(whole + whole.splitlines()[-1][:-7])
    trace = read_traces([path], OPTIONS)
    assert trace.num_requests == 2
    assert trace.notes == ("The last line of trace is cut short, and was left out.",)


def zstd(text: bytes) -> bytes:
    if shutil.which("zstd") is None:
        pytest.skip("no zstd to pack with")
    return subprocess.run(["zstd"], input=text, capture_output=True, check=True).stdout


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_packed_traces_whatever_they_are_called(tmp_path: Path, packing: str) -> None:
    text = f"{mooncake(0, [1])}\n{mooncake(1000, [1])}\n".encode()
    path = tmp_path / "trace"
    if packing == "gzip":
        path.write_bytes(gzip.compress(text))
    else:
        path.write_bytes(zstd(text))
    assert shared(read_traces([path], OPTIONS)) == [0, 1]


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_damaged_packing_is_told(tmp_path: Path, packing: str) -> None:
    text = "".join(f"{mooncake(at, [at])}\n" for at in range(2000)).encode()
    path = tmp_path / "trace"
    if packing == "gzip":
        path.write_bytes(gzip.compress(text)[:-2000])
    else:
        packed = zstd(text)
        path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ConfigError, match="trace: can't be unpacked|trace:[0-9]+: no JSON"):
        read_traces([path], OPTIONS)


def test_without_zstd_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "trace"
    path.write_bytes(b"\x28\xb5\x2f\xfd....")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"trace is packed by zstd: pip install"):
        read_traces([path], OPTIONS)


def test_several_traces_are_replayed_together(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text(f"{mooncake(1000, [1])}\n{mooncake(4000, [1])}\n")
    two.write_text(f"{mooncake(9000, [1])}\n")
    trace = read_traces([one, two], OPTIONS)
    assert trace.times.tolist() == [0, 0, 3]
    assert shared(trace) == [0, 0, 1]  # what two files call 1 are two blocks
    assert trace.notes == ("The traces were laid over each other, each from its own start.",)


def test_recordings_of_one_salt_share_blocks_at_their_own_times(tmp_path: Path) -> None:
    for name, started in (("one", 1e9), ("two", 1e9 + 10)):
        (tmp_path / name).write_text("\n".join(recording([1, 2], started=started)) + "\n")
    trace = read_traces([tmp_path / "two", tmp_path / "one"], OPTIONS)
    assert trace.times.tolist() == [0, 10]
    assert shared(trace) == [0, 2]
    assert not trace.notes


def test_traces_of_other_blocks_dont_mix(tmp_path: Path) -> None:
    (tmp_path / "one").write_text(mooncake(0, [1]) + "\n")
    (tmp_path / "two").write_text(bailian(0, [1], 1) + "\n")
    with pytest.raises(ConfigError, match="blocks of 16 and of 512 tokens can't be replayed"):
        read_traces([tmp_path / "one", tmp_path / "two"], OPTIONS)


HEADER = recording()[0]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([mooncake(0, [1]), "{"], ":2: no JSON"),
        ([mooncake(0, [1]), "[]"], ":2: no JSON object"),
        ([mooncake(0, [1]), '{"timestamp": 1}'], ":2: hash_ids should be a list of integers"),
        ([mooncake(0, [1]), mooncake(1, [-1])], ":2: hash_ids should be integers in 0 .. 2"),
        (
            [mooncake(0, [1]), mooncake(1, [1]).replace("1000", '"many"')],
            ":2: input_length is 'many', and should be a number",
        ),
        ([mooncake(0, [1], -4)], ":1: input_length is -4, and should be 0 or more"),
        ([mooncake(0, [1]).replace("0,", "NaN,", 1)], ":1: timestamp is nan: out of range"),
        ([mooncake(0, [])], "no request has a whole block of 512 tokens"),
        ([""], "empty; there is nothing to replay"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens"], "none of the known traces"),
        ([session("a", REQUESTS), session("b", [[0.0, 1]])], ":2: request 0 can't be read"),
        ([session("a", [[0.0, 64, 1, 0, 0, [0, -1]]])], ":1: request 0 can't be read: its runs"),
        ([session("a", [[0.0, 64, 1, 0, 0, [0, 1 << 40]]])], ":1: request 0 can't be read"),
        ([session("a", []).replace("64", "0")], ":1: block_size is 0"),
        ([VLLM[1].replace("5]", "5, None]")], ":1: the token ids are cut short or no integers"),
        ([SGLANG[1].replace("3, 4", "3] ... [4")], ":1: the token ids are cut short"),
        ([VLLM[1].replace("09:00:02", "")], ":1: a request without a time"),
        ([VLLM[1].replace("1, 2", "-1, 2")], ":1: token ids must lie in 0"),
        ([HEADER.replace("1,", "2,", 1)], ":1: version 2 of the format; this kvtier reads 1"),
        ([HEADER, '[0.0,1,1,0,0,"x"]'], ":2: no request of a recording"),
        ([HEADER, '[0.0,1,1,0,5,""]'], ":2: no request of a recording"),
        ([HEADER, '[0.0,1,1,-1,0,""]'], ":2: no request of a recording: -1 is out of range"),
        ([HEADER, '[1e999,1,1,0,0,""]'], ":2: no request of a recording: inf is out of range"),
        ([HEADER, "{"], ":2: no JSON"),
        ([HEADER, HEADER.replace("64", "32")], ":2: blocks of 32 tokens, after some of 64"),
    ],
)
def test_what_cant_be_read_is_told_in_one_sentence(
    read: Callable[..., Trace], lines: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*lines)
    assert sentence in str(caught.value)
    assert "trace.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: can't be read: No such file"):
        read_traces([tmp_path / "nowhere"], OPTIONS)
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        read_traces([tmp_path], OPTIONS)


SAMPLES = [
    mooncake(0, [1, 2]),
    bailian(0, [1, 2], 1),
    session("a", REQUESTS),
    VLLM[1],
    SGLANG[1],
    SGLANG_JSON[0],
    "\n".join(recording([1, 2], [1, 3])),
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sample=st.sampled_from(SAMPLES), data=st.data())
def test_damaged_traces_give_a_trace_or_a_sentence(
    tmp_path: Path, sample: str, data: st.DataObject
) -> None:
    text = bytearray(sample.encode() + b"\n" + sample.encode() + b"\n")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
        if not text:
            break
    path = tmp_path / "trace"
    path.write_bytes(bytes(text))
    trace, sentence = None, ""
    try:
        trace = read_traces([path], OPTIONS)
    except ConfigError as error:
        sentence = str(error)
    if trace is None:
        assert sentence
        assert "\n" not in sentence
    else:
        assert find_segments(trace).length.sum() == trace.num_references
        assert np.isfinite(trace.times).all()
