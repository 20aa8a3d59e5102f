"""Readers of traces: each format by a hand-made sample, and errors by file and line."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.errors import ConfigError
from kvtier.observe.recording import Chains
from kvtier.tools.replay.trace import Trace
from kvtier.tools.replay.traces import ReadOptions, read_traces
from tests.tools.replay.samples import (
    HEADER,
    OPTIONS,
    REQUESTS,
    SGLANG,
    SGLANG_JSON,
    VLLM,
    bailian,
    mooncake,
    recording,
    session,
    shared,
)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Trace]:
    def reading(*lines: str, options: ReadOptions = OPTIONS, name: str = "trace.jsonl") -> Trace:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return read_traces([path], options)

    return reading


def test_mooncake(read: Callable[..., Trace]) -> None:
    trace = read(mooncake(2500, [1, 2, 4]), "", mooncake(500, [1, 2, 3]), mooncake(2500, [4, 2]))
    assert trace.times.tolist() == [0.0, 2.0, 2.0]
    assert trace.lengths.tolist() == [3, 3, 2]
    assert trace.block_tokens == 512
    assert trace.input_tokens.tolist() == [1000] * 3
    assert trace.output_tokens.tolist() == [7] * 3
    assert shared(trace) == [0, 2, 0]  # the last request's block 2 has another parent


def in_session(name: str, ids: list[int], **times: float) -> str:
    fields = {"session_id": name, "hash_ids": ids, "input_length": 1000, "output_length": 7}
    return json.dumps(fields | times)


def test_mooncake_with_sessions_and_delays(read: Callable[..., Trace]) -> None:
    trace = read(
        in_session("a", [1, 2], timestamp=500),
        in_session("b", [7], timestamp=1000),
        in_session("a", [1, 2, 3], delay=2000),
        in_session("b", [7, 8], timestamp=4000),
        in_session("a", [1, 2, 3, 4], delay=0),
    )
    assert trace.times.tolist() == [0.0, 0.5, 2.0, 2.0, 3.5]
    assert trace.lengths.tolist() == [2, 1, 3, 4, 2]
    assert shared(trace) == [0, 0, 2, 3, 1]
    assert any("2 requests have a delay" in note for note in trace.notes)


def test_sessions_without_a_start_are_begun_at_random(read: Callable[..., Trace]) -> None:
    lines = [in_session("a", [1]), in_session("b", [7]), in_session("a", [1, 2], delay=1000)]
    trace = read(*lines, options=agentic(hours=0.5))
    assert trace.times.tolist() == read(*lines, options=agentic(hours=0.5)).times.tolist()
    assert 0 < trace.times[-1] < 1801
    assert any("2 sessions have no start of their own" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (in_session("a", [1]), ":2: timestamp and delay are missing"),
        (in_session("a", [1], delay=float("nan")), ":2: delay is nan: out of range"),
        ('{"hash_ids": [1], "input_length": 9, "delay": 5}', ":2: timestamp is missing, and there"),
    ],
)
def test_request_whose_time_is_unknown_is_refused(
    read: Callable[..., Trace], line: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(in_session("a", [1], timestamp=5), line)


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


def agentic(*, hours: float = 1.0, sessions: int = 0, shared_prefix: bool = True) -> ReadOptions:
    chains = OPTIONS.chains
    return ReadOptions(chains, hours=hours, sessions=sessions, shared_prefix=shared_prefix)


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


def test_recording(read: Callable[..., Trace]) -> None:
    lines = recording([1, 2, 3], [1, 2, 4], [], [1, 2, 4, 5])
    trace = read(*lines, *recording([1, 2, 3], started=1e9 + 60))
    assert trace.times.tolist() == [0, 1, 2, 3, 60]
    assert trace.lengths.tolist() == [3, 3, 0, 4, 3]
    assert shared(trace) == [0, 2, 0, 3, 3]
    # The known blocks of a prefix are not written again.
    assert len(lines[4]) < len(lines[1])


def test_recording_that_a_crash_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    whole = "\n".join(recording([1, 2], [1, 2, 3])) + "\n"
    path.write_text(whole + whole.splitlines()[-1][:-7])
    trace = read_traces([path], OPTIONS)
    assert trace.num_requests == 2
    assert trace.notes == ("The last line of trace is cut short, and was left out.",)


def packed(packing: str, text: bytes) -> bytes:
    if packing == "gzip":
        return gzip.compress(text)
    if shutil.which("zstd") is None:
        pytest.skip("no zstd to pack with")
    return subprocess.run(["zstd"], input=text, capture_output=True, check=True).stdout


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_packed_traces_whatever_they_are_called(tmp_path: Path, packing: str) -> None:
    text = f"{mooncake(0, [1])}\n{mooncake(1000, [1])}\n".encode()
    path = tmp_path / "trace"
    path.write_bytes(packed(packing, text))
    assert shared(read_traces([path], OPTIONS)) == [0, 1]


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_damaged_packing_is_told(tmp_path: Path, packing: str) -> None:
    text = "".join(f"{mooncake(at, [at])}\n" for at in range(2000)).encode()
    path = tmp_path / "trace"
    content = packed(packing, text)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match="trace: can't be unpacked|trace:[0-9]+: no JSON"):
        read_traces([path], OPTIONS)


def test_without_zstd_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "trace"
    path.write_bytes(b"\x28\xb5\x2f\xfd....")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"trace is packed by zstd; unpack it, or install"):
        read_traces([path], OPTIONS)


def test_several_traces_are_replayed_together(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text(f"{mooncake(1000, [1])}\n{mooncake(4000, [1])}\n")
    two.write_text(f"{mooncake(9000, [1])}\n")
    trace = read_traces([one, two], OPTIONS)
    assert trace.times.tolist() == [0, 0, 3]
    assert shared(trace) == [0, 0, 1]  # id 1 is another block in each file
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
    (tmp_path / "two").write_text(bailian(0, [1, 2], 1) + "\n")
    with pytest.raises(ConfigError, match="blocks of 16 and of 512 tokens can't be replayed"):
        read_traces([tmp_path / "one", tmp_path / "two"], OPTIONS)


DEEP = "[" * 100_000
MANY = [0, 1 << 40]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([mooncake(0, [1]), "{"], ":2: no JSON"),
        ([mooncake(0, [1]), "[]"], ":2: no JSON object"),
        ([mooncake(0, [1]), '{"timestamp": 1}'], ":2: hash_ids is missing"),
        ([mooncake(0, [1]), mooncake(1, [1 << 600])], ":2: hash_ids should be integers of 512"),
        (
            [mooncake(0, [1]), mooncake(1, [1]).replace("1000", '"many"')],
            ":2: input_length is 'many', and should be a number",
        ),
        ([mooncake(0, [1], -4)], ":1: input_length is -4, and should be 0 or more"),
        ([mooncake(0, [1]).replace("0,", "NaN,", 1)], ":1: timestamp is nan: out of range"),
        ([mooncake(0, [])], "no request has a whole block of 512 tokens"),
        ([""], "empty; there is nothing to replay"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens"], "no request has a whole block of 2 tokens"),
        ([session("a", REQUESTS), session("b", [[0.0, 1]])], ":2: request 0 can't be read"),
        ([session("a", [[0.0, 64, 1, 0, 0, [0, -1]]])], ":1: request 0 can't be read: its runs"),
        ([session("a", [[0.0, 64, 1, 0, 0, [0, 1 << 40]]])], ":1: up to here the trace has more"),
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
        # Hostile ones.
        ([mooncake(0, [1]), DEEP], ":2: no JSON"),
        ([DEEP], "none of the known traces"),
        (['{"a":' * 50_000], "none of the known traces"),
        ([mooncake(0, [1]), mooncake(10**400, [1])], ":2: timestamp is 1000000000000000000000"),
        ([mooncake(0, [1]), mooncake(0, [10**400])], ":2: hash_ids should be integers"),
        ([mooncake(0, [1]), mooncake(0, [1], 10**5000 // 10**4500)], ":2: input_length is 1000"),
        ([HEADER, f'[{10**400},1,1,0,0,""]'], ":2: no request of a recording"),
        ([HEADER, f'[0,{10**400},1,0,0,""]'], ":2: no request of a recording"),
        ([HEADER, f'[0,1,1,{10**400},1,""]'], ":2: no request of a recording"),
        ([HEADER.replace("64", str(10**400))], ":1: block_tokens is 1000"),
        ([HEADER.replace("1,", "[[[]]],", 1)], ":1: version a JSON list of the format"),
        ([session("a", [[10**400, 64, 1, 0, 0, [0, 1]]])], ":1: request 0 can't be read"),
        ([session("a", [[0, 64, 1, 0, 10**400, [0, 1]]])], ":1: up to here the trace has more"),
        ([session("a", [[0, 64, 1, 0, 0, MANY]])], ":1: up to here the trace has more than"),
        ([session("a", [[0, 64, 1, 0, 0, [0, 1 << 21]]] * 500)], ":1: up to here the trace has"),
        ([VLLM[1].replace("[1,", f"[{10**400},")], ":1: token ids must lie in 0"),
    ],
)
def test_what_cant_be_read_is_told_in_one_sentence(
    read: Callable[..., Trace], lines: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tools.replay.trace.MAX_BLOCKS", 1 << 22)
    with pytest.raises(ConfigError) as caught:
        read(*lines)
    assert sentence in str(caught.value)
    assert "trace.jsonl" in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: can't be read: No such file"):
        read_traces([tmp_path / "nowhere"], OPTIONS)
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        read_traces([tmp_path], OPTIONS)


def vllm_line(prompt: str, ids: Sequence[int], time: str = "02-13 11:33:33") -> str:
    """Return a request as vLLM logs it at DEBUG."""
    return (
        f"(APIServer pid=9) DEBUG {time} [entrypoints/.../utils/request_logger.py:55] Request "
        f"cmpl-1 details: prompt: {prompt!r}, prompt_token_ids: {list(ids)}, "
        "prompt_embeds shape: None."
    )


def sglang_line(prompt: str, ids: Sequence[int]) -> str:
    return (
        f"[2026-03-03 17:53:04] Receive: obj=GenerateReqInput(text={prompt!r}, "
        f"input_ids={list(ids)}, stop=[])"
    )


TRICKS = [
    "prompt_token_ids: [9]",
    "', prompt_token_ids: [9], 'x",
    '", prompt_token_ids: [9], "\'\\',
    'it\'s "so", input_ids=[9], (',
    "', input_ids=[9], text='",
    "Request a details: prompt: None, prompt_token_ids: [9], ",
    'Receive: obj=GenerateReqInput(input_ids=[9]) {"event": "request.received"}',
]


@pytest.mark.parametrize("prompt", TRICKS)
@pytest.mark.parametrize("write", [vllm_line, sglang_line])
def test_ids_quoted_in_a_prompt_are_text(
    read: Callable[..., Trace], write: Callable[..., str], prompt: str
) -> None:
    trace = read(write(prompt, [1, 2, 3, 4]))
    assert trace.input_tokens.tolist() == [4]


@pytest.mark.parametrize(
    "line",
    [
        'DEBUG 02-13 11:33:33 [logger.py:75] Request c JSON body: {"prompt": "{}"}',
        'INFO: 10.0.0.1:40000 - "GET /{} HTTP/1.1" 200 OK',
        '[2026-03-03 17:53:05] Finish: obj=GenerateReqInput(text=None), out={"text": "{}"}',
        "WARNING 02-13 11:33:33 [x.py:1] unknown field '{}'",
    ],
)
@pytest.mark.parametrize("quoted", [VLLM[2], SGLANG[1], SGLANG_JSON[0]])
def test_a_request_quoted_in_another_line_is_no_request(
    read: Callable[..., Trace], line: str, quoted: str
) -> None:
    assert read(line.replace("{}", quoted), VLLM[1]).num_requests == 1


@pytest.mark.parametrize(
    "line",
    [
        "DEBUG 02-13 11:33:33 [logger.py:75] Request c JSON body: " + "fox {[(' " * 200_000,
        "Request a details: prompt: " * 60_000,
        vllm_line("'\"\\" * 300_000, [1, 2])[:-400_000],
        vllm_line("x", [])[:-40] + "[" * 1_000_000,
        sglang_line("(" * 1_000_000, [1, 2]).replace("2026-03-03", "11-22")[:-10],
        "Receive: obj=" * 100_000 + "A" * 1_000_000,
        '{"event": "request.received", "obj": ' + "[" * 1_000_000,
        '{"message": ' * 100_000,
        "\\'" * 1_000_000,
        "\n".join(f"2026-03-10T09:00:00.0Z stdout P {'x' * 30}" for _ in range(100_000)),
        "\n".join("Mar 10 09:00:00 h v[1]: Request a details: prompt: '" for _ in range(50_000)),
        "\n".join(["Request a details: prompt: '" + "x" * 1000, *["y" * 1000] * 10_000]),
        "\n".join('{"log": "x", "stream": "stdout"}' for _ in range(100_000)),
        "\n".join(
            f"Mar 10 09:00:00 h v[{at}]: Request a details: prompt: '" for at in range(50_000)
        ),
    ],
)
def test_a_hostile_line_is_read_once(tmp_path: Path, line: str) -> None:
    """Reading takes linear time.

    The limit of processor time is a hundredth of the time of a quadratic reader.
    """
    path = tmp_path / "server.log"
    path.write_text(f"{line}\n{VLLM[1]}\n")
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from kvtier.core.errors import ConfigError\n"
        "from kvtier.tools.replay.traces import read_traces\n"
        "from tests.tools.replay.samples import OPTIONS\n"
        "used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (used + 10, used + 10))\n"
        "try: print(read_traces([Path(sys.argv[1])], OPTIONS).num_requests)\n"
        "except ConfigError as error: print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert ended.returncode == 0, ended
    assert ended.stdout in ("1\n", "2\n") or ".log:" in ended.stdout


def test_first_request_may_come_after_any_number_of_lines(read: Callable[..., Trace]) -> None:
    probes = ['INFO: 10.0.0.1:4 - "GET /health HTTP/1.1" 200 OK'] * 30_000
    assert read(*probes, *VLLM).num_requests == 2


def test_a_log_without_requests_is_told(read: Callable[..., Trace]) -> None:
    with pytest.raises(ConfigError, match="no line has a request with token ids"):
        read(*[VLLM[0]] * 5)


def test_last_line_of_a_log_may_be_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("\n".join(VLLM) + "\n" + VLLM[1][:-60])
    trace = read_traces([path], OPTIONS)
    assert trace.num_requests == 2
    assert "The last line of server.log is cut short, and was left out." in trace.notes


# -- logs in parts ---------------------------------------------------------------------------------


def cri(line: str, size: int = 16384, stream: str = "stdout") -> list[str]:
    """Return a line as containerd and CRI-O write it."""
    time = f"2026-03-10T09:00:00.123456789Z {stream}"
    *parts, last = [line[at : at + size] for at in range(0, max(1, len(line)), size)]
    return [*(f"{time} P {part}" for part in parts), f"{time} F {last}"]


def docker(line: str, size: int = 16384) -> list[str]:
    """Return a line as Docker's json-file driver writes it."""
    entry = {"stream": "stdout", "time": "2026-03-10T09:00:00.123456789Z"}
    line += "\n"
    parts = [line[at : at + size] for at in range(0, max(1, len(line)), size)]
    return [json.dumps({"log": part, **entry}) for part in parts]


def journal(line: str, size: int = 48 << 10, pid: int = 9) -> list[str]:
    """Return a line as ``journalctl`` shows it."""
    parts = [line[at : at + size] for at in range(0, max(1, len(line)), size)]
    return [f"Mar 10 09:00:00 host vllm[{pid}]: {part}" for part in parts]


LONG = list(range(100_000, 125_000))
CUTTERS: list[Callable[[str], list[str]]] = [cri, docker, journal, partial(journal, size=20480)]


PROMPTS = ["fox", "'\"\\ [(" * 5000, *TRICKS]


@pytest.mark.parametrize("write", [vllm_line, sglang_line])
@pytest.mark.parametrize(
    ("cut", "prompt"),
    [*product(CUTTERS, PROMPTS), *product([cri, docker], ["字" * 30_000])],
)
def test_pieces_of_a_line_are_joined(
    read: Callable[..., Trace],
    cut: Callable[[str], list[str]],
    write: Callable[..., str],
    prompt: str,
) -> None:
    wanted = read(write(prompt, LONG), write("x", [1, 2, 3, 4]))
    trace = read(*cut(write(prompt, LONG)), *cut(write("x", [1, 2, 3, 4])))
    assert trace.input_tokens.tolist() == wanted.input_tokens.tolist() == [len(LONG), 4]
    assert trace.keys.tolist() == wanted.keys.tolist()
    assert not [note for note in trace.notes if "left out" in note]


@pytest.mark.parametrize("cut", [cri, docker])
@pytest.mark.parametrize("line", [VLLM[1], SGLANG[1], SGLANG_JSON[0]])
def test_a_line_of_a_container_is_read_as_without_it(
    read: Callable[..., Trace], cut: Callable[..., list[str]], line: str
) -> None:
    assert read(*cut(line, size=50)).input_tokens.tolist() == read(line).input_tokens.tolist()


def test_pieces_of_two_writers_that_alternate_are_joined_by_writer(
    read: Callable[..., Trace],
) -> None:
    short, long = vllm_line("x", LONG[:20_000]), vllm_line("x", LONG)
    for first, second in (
        (journal(short, pid=1), journal(long, pid=2)),
        (cri(short, stream="stdout"), cri(long, stream="stderr")),
    ):
        mixed = [each for pair in zip_longest(first, second) for each in pair if each]
        assert sorted(read(*mixed).input_tokens) == [20_000, 25_000]


def test_a_line_that_begins_where_journald_cuts_is_the_clients_text(
    read: Callable[..., Trace],
) -> None:
    forged = vllm_line("y", [9])
    begin = vllm_line("", []).index("''") + 1
    line = vllm_line("x" * ((48 << 10) - begin) + forged + "y" * (48 << 10), [1, 2, 3])
    assert journal(line)[1].partition("]: ")[2].startswith(forged)
    assert read(*journal(line)).input_tokens.tolist() == [3]


@pytest.mark.parametrize(
    "bad",
    [
        vllm_line("x", LONG)[:9000],
        vllm_line("x", LONG)[:9000] + vllm_line("x", LONG)[100:],
        vllm_line("x", LONG)[:9000] + "INFO 02-13 11:33:33 [loggers.py:1] Engine 000: 1 req/s",
        vllm_line("x", [1, 2]).replace("02-13", "02-31"),
        vllm_line("x", [1, -2]),
        SGLANG_JSON[0][:-40],
        json.dumps({"time": "2026-03-10 09:00:00", "message": vllm_line("x", LONG)})[:9000],
    ],
)
def test_a_line_that_cant_be_read_costs_its_request_only(
    read: Callable[..., Trace], bad: str
) -> None:
    good = vllm_line("x", [1, 2, 3, 4])
    trace = read(good, bad, good, bad, good)
    assert trace.input_tokens.tolist() == [4, 4, 4]
    (note,) = [note for note in trace.notes if "left out" in note]
    assert note.startswith("2 lines of requests are left out, which can't be read. The first one: ")
    assert ":2: " in note
    with pytest.raises(ConfigError, match=":1: "):
        read(bad)


@pytest.mark.parametrize("lines", [VLLM, SGLANG, [mooncake(0, [1, 2]), mooncake(1, [1, 2])]])
def test_a_hole_left_by_a_truncated_log_is_skipped(tmp_path: Path, lines: list[str]) -> None:
    path = tmp_path / "server.log"
    with path.open("wb") as file:
        file.truncate(40 << 20)  # NULs
        file.seek(0, os.SEEK_END)
        file.write("\n".join([*lines, ""]).encode())
    plain = tmp_path / "plain"
    plain.write_text("\n".join([*lines, ""]))
    assert (
        read_traces([path], OPTIONS).input_tokens.tolist()
        == read_traces([plain], OPTIONS).input_tokens.tolist()
    )


def test_pieces_without_an_end_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tools.replay.traces.log_lines.MAX_LINE", 50_000)
    path = tmp_path / "server.log"
    endless = cri(vllm_line("x", LONG))
    path.write_text("\n".join([*endless, *cri(vllm_line("x", [1, 2, 3])), ""]))
    trace = read_traces([path], OPTIONS)
    assert trace.input_tokens.tolist() == [3]
    assert any("1 line of a request is left out" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        (["12-31 23:59:59", "01-01 00:00:01"], [0, 2]),
        (["12-31 23:59:59", "01-01 00:00:01", "12-31 23:59:59.5"], [0, 0.5, 2]),
        (["02-28 23:59:59", "03-01 00:00:01"], [0, 2]),
        (["02-28 23:59:59", "02-29 23:59:59", "03-01 00:00:01"], [0, 86400, 86402]),
        (
            ["02-29 00:00:00", "07-29 00:00:00", "12-31 00:00:00", "01-01 00:00:00"],
            [0, 151 * 86400, 306 * 86400, 307 * 86400],
        ),
    ],
)
def test_times_without_a_year_go_on_over_its_turn(
    read: Callable[..., Trace], times: list[str], seconds: list[float]
) -> None:
    trace = read(*[vllm_line("x", [1, 2], time) for time in times])
    assert trace.times.tolist() == seconds


def test_time_of_a_request_is_the_engines(read: Callable[..., Trace]) -> None:
    message = vllm_line("2001-01-01 00:00:00", [1, 2])
    lines = [
        json.dumps({"message": message.replace("02-13", ""), "time": f"2026-01-01T00:00:0{at}Z"})
        for at in (1, 4)
    ]
    assert read(*lines).times.tolist() == [0, 3]


def test_logs_without_a_year_are_laid_side_by_side_only_with_each_other(tmp_path: Path) -> None:
    for name, time in (("one", "12-31 23:59:50"), ("two", "01-01 00:00:10")):
        (tmp_path / name).write_text(vllm_line("x", [1, 2], time) + "\n")
    (tmp_path / "three").write_text(SGLANG[1] + "\n")
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    assert read_traces([one, two], OPTIONS).times.tolist() == [0, 20]
    assert read_traces([two, one], OPTIONS).times.tolist() == [0, 20]
    mixed = read_traces([one, three], OPTIONS)
    assert mixed.times.tolist() == [0, 0]
    assert "The traces were laid over each other, each from its own start." in mixed.notes


def test_trace_is_bounded_by_the_memory_that_is_free(
    read: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tools.replay.trace.available_bytes", lambda: (100_000, "a test"))
    with pytest.raises(ConfigError, match=r":4: up to here the trace has more than 2,500 blocks"):
        read(*recording(range(1000), [*range(1000), 1], [*range(1000), 2]))


def test_recording_that_expands_is_refused_before_it_does(
    read: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line refers to all blocks of the first one again, in 20 bytes."""
    monkeypatch.setattr("kvtier.tools.replay.trace.MAX_BLOCKS", 1 << 20)
    lines = recording(range(1 << 16))
    with pytest.raises(ConfigError, match=r":1[0-9]: up to here the trace has more than 1,048,576"):
        read(*lines, *['[1.0,1,1,0,65536,""]'] * 1000)


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{}\n", r"trace:[0-9]+: .* bytes that unpack to more than 100 times as many"),
        (b"\n" * 4, "trace:1000001: 1,000,000 empty lines, as no trace has"),
        (b" ", "trace:1: a line of more than 1,000,000 characters"),
    ],
)
def test_bombs_are_refused(
    tmp_path: Path,
    packing: str,
    content: bytes,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.tools.replay.traces.lines.LEAST_LIMIT", 1 << 20)
    monkeypatch.setattr("kvtier.tools.replay.traces.lines.MAX_LINE", 1_000_000)
    text = content * (4 << 20)
    path = tmp_path / "trace"
    path.write_bytes(packed(packing, text))
    with pytest.raises(ConfigError, match=sentence):
        read_traces([path], OPTIONS)


def test_a_line_is_not_unpacked_beyond_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tools.replay.traces.lines.MAX_LINE", 1_000_000)
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(b" " * (32 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="a line of more than 1,000,000 characters"):
            read_traces([path], OPTIONS)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: can't be read: it is no file"):
        read_traces([tmp_path / "pipe"], OPTIONS)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "trace"
    path.write_text(f"{mooncake(0, [1])}\n{mooncake(1000, [1])}\n", encoding=encoding)
    assert shared(read_traces([path], OPTIONS)) == [0, 1]


def hashed(num: int, tokens: int, every: float = 1000, **fields: object) -> list[str]:
    """Return a Mooncake-like trace of prompts that share their first blocks, of ``tokens`` each."""
    made = []
    for at in range(num):
        ids = [0, 1, 2, *range(100 * at + 3, 100 * at + 20)]
        request: dict[str, Any] = {"timestamp": at * every, "input_length": tokens * len(ids) - 5}
        request |= {"output_length": 9, "hash_ids": ids} | fields
        made.append(json.dumps({name: each for name, each in request.items() if each is not None}))
    return made


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (
            hashed(300, 64),
            "prompts have about 65 tokens per block, and not 512, as this .*-tokens 64$",
        ),
        (
            hashed(300, 16, chat_id=None),
            "prompts have about 16 tokens .* for example --block-tokens 16",
        ),
        (hashed(300, 48), "for example --block-tokens 49"),
        (hashed(300, 2048), "for example --block-tokens 2048"),
        (
            hashed(300, 512, every=1),
            "read in ms, 300 requests .* come within 0.299 s, more than .* unit",
        ),
        (hashed(300, 512, timestamp=None), ":1: timestamp is missing, and there is no session_id"),
        (hashed(300, 512, input_length=None), ":1: input_length is missing: say how many tokens"),
        (hashed(300, 512, hash_ids=None), ":1: hash_ids is missing"),
        (hashed(2, 512, every=4e10), "the first and the last request are 463 days apart, so some"),
        (
            [*recording([1, 2], started=1.0), *recording([1, 2], started=1.7e9)],
            "are 19,676 days apart, so some times are wrong",
        ),
        (
            [session("a", [[0.0, 64, 1, 0, 0, [0, 500]]])],
            "prompts of 64 tokens have 500 blocks of 64 tokens, more than twice",
        ),
        ([session("a", REQUESTS).replace('"block_size"', '"size"')], ":1: block_size is missing"),
    ],
)
def test_a_trace_in_other_units_is_refused_in_one_sentence(
    read: Callable[..., Trace], lines: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        read(*lines)
    assert "\n" not in str(caught.value)


def test_units_that_were_said_or_shown_are_read(read: Callable[..., Trace]) -> None:
    seconds = ReadOptions(OPTIONS.chains, time_unit="s")
    assert read(*hashed(300, 512, every=1), options=seconds).window_s == 299
    since_1970 = [mooncake(1_700_000_000 + at, [1]) for at in range(3)]
    assert read(*since_1970).times.tolist() == [0, 1, 2]
    since_1970 = [bailian(1_700_000_000_000 + 1000 * at, [1, 2], 1) for at in range(3)]
    assert read(*since_1970).times.tolist() == [0, 1, 2]
    of_64 = ReadOptions(OPTIONS.chains, block_tokens=64)
    assert read(*hashed(300, 64), options=of_64).block_tokens == 64
    assert not read(*hashed(300, 64), options=of_64).notes
    coarse = ReadOptions(OPTIONS.chains, block_tokens=64, coarsen=4)
    assert read(*hashed(300, 64), options=coarse).block_tokens == 256
    wrong = ReadOptions(OPTIONS.chains, block_tokens=80)
    note = "trace.jsonl: prompts have about 65 tokens per block, and not 80, as was said."
    assert read(*hashed(300, 64), options=wrong).notes == (note,)


def test_a_field_that_is_not_needed_may_be_missing(read: Callable[..., Trace]) -> None:
    trace = read(*hashed(300, 512, output_length=None))
    assert trace.num_requests == 300
    assert trace.notes == ("The trace does not say how long all answers were.",)
    of_512 = ReadOptions(OPTIONS.chains, block_tokens=512)
    assert read(*hashed(300, 512, input_length=None), options=of_512).num_requests == 300


@pytest.mark.parametrize(
    "name", [lambda at: at << 40, lambda at: -at - 1, lambda at: at + (1 << 127)]
)
def test_wide_and_negative_ids_are_read(
    read: Callable[..., Trace], name: Callable[[int], int]
) -> None:
    trace = read(mooncake(0, [*map(name, (1, 2))]), mooncake(9, [*map(name, (1, 3))]))
    assert shared(trace) == [0, 1]
