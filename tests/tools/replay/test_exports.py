"""Traces that other programs export: text, which needs a tokenizer, and lengths alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.errors import ConfigError
from kvtier.observe.recording import Chains
from kvtier.serve.engine.model_names import BUILTIN
from kvtier.tools.replay.trace import Trace
from kvtier.tools.replay.traces import ReadOptions, read_traces
from kvtier.tools.report.figures import capacity
from tests.kit.cli import kvtier, refused
from tests.tools.replay.samples import shared

pytest.importorskip("tokenizers")

TINY = str(BUILTIN / "kvtier-tiny")
OPTIONS = ReadOptions(Chains(bytes(32), 4), tokenizer=TINY, hours=1.0)
SYSTEM = {"role": "system", "content": "You answer in one sentence, and in plain words."}


def ask(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def sharegpt(name: str, *texts: str) -> dict[str, Any]:
    sides = ("human", "gpt")
    turns = [{"from": sides[at % 2], "value": text} for at, text in enumerate(texts)]
    return {"id": name, "conversations": turns}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Trace]:
    def reading(text: str, options: ReadOptions = OPTIONS) -> Trace:
        path = tmp_path / "trace"
        path.write_text(text)
        return read_traces([path], options)

    return reading


def lines(*rows: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


TURNS = ("How tall is the tower of Pisa?", "It is 57 m tall.", "And its weight?", "14,500 t.")


@pytest.mark.parametrize("indent", [None, 2])
def test_turns_of_sharegpt_share_their_conversation(
    read: Callable[..., Trace], indent: int | None
) -> None:
    rows = [sharegpt("a", *TURNS), sharegpt("b", "Who are you?", "A model.")]
    trace = read(json.dumps(rows, indent=indent))
    assert trace.times.tolist() == [0.0, 60.0, 1800.0]
    assert shared(trace) == [0, trace.lengths[0], 1]  # both begin with the name of their side
    assert trace.lengths[1] > trace.lengths[0]
    assert all(trace.output_tokens > 0)
    assert any("does not say when requests came" in note for note in trace.notes)
    assert read(lines(*rows)).keys.tolist() == trace.keys.tolist()


def test_a_batch_shares_what_its_prompts_begin_with(read: Callable[..., Trace]) -> None:
    def row(text: str, model: str = "m") -> dict[str, Any]:
        body = {"model": model, "messages": [SYSTEM, ask(text)]}
        return {"custom_id": text, "method": "POST", "url": "/v1/chat/completions", "body": body}

    trace = read(lines(row("one"), row("two"), row("two", model="another")))
    assert trace.times.tolist() == [0.0, 1200.0, 2400.0]
    found = shared(trace)
    assert found[1] >= 2
    assert found[2] == 0  # the KV of another model
    assert any("how long all answers were" in note for note in trace.notes)


def test_litellm_has_times_usage_and_messages_in_text(read: Callable[..., Trace]) -> None:
    def row(start: object, messages: object) -> dict[str, Any]:
        usage = {"prompt_tokens": 9, "completion_tokens": 21}
        return {"call_type": "acompletion", "startTime": start, "messages": messages, **usage}

    prompt = [SYSTEM, ask("one")]
    trace = read(
        lines(
            row("2026-01-31T12:00:00Z", prompt),
            row("2026-01-31 12:00:30.5", json.dumps(prompt)),
            {"call_type": "aembedding", "startTime": "2026-01-31 12:01:00", "messages": ""},
        )
    )
    assert trace.times.tolist() == [0.0, 30.5]
    assert trace.output_tokens.tolist() == [21, 21]
    assert shared(trace) == [0, trace.lengths[0]]
    assert any("1 of 3 objects are no requests" in note for note in trace.notes)
    stamps = lines(row(1769860800.0, prompt), row(1769860802000, prompt))
    assert read(stamps).times.tolist() == [0.0, 2.0]


def test_langfuse_has_generations_among_its_observations(read: Callable[..., Trace]) -> None:
    def row(second: int, kind: str, prompt: object) -> dict[str, Any]:
        time = f"2026-01-31T12:00:{second:02}.000Z"
        return {"type": kind, "startTime": time, "input": prompt, "usageDetails": {"output": 5}}

    parts = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image_url"}]}
    rows = [
        row(1, "GENERATION", [SYSTEM, parts]),
        row(2, "SPAN", [SYSTEM, ask("one")]),
        row(3, "GENERATION", {"messages": [SYSTEM, ask("one")]}),
        row(4, "GENERATION", "A plain prompt that is no message at all."),
    ]
    for text in (lines(*rows), json.dumps(rows)):
        trace = read(text)
        assert trace.times.tolist() == [0.0, 2.0, 3.0]
        assert shared(trace) == [0, trace.lengths[0], 0]
        assert trace.output_tokens.tolist() == [5, 5, 5]


def test_tools_and_calls_are_a_part_of_the_prompt(read: Callable[..., Trace]) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]}
    tools = [{"type": "function", "function": {"name": "look"}}]
    bare = {"model": "m", "messages": [SYSTEM, ask("one")]}
    with_tools = {**bare, "tools": tools}
    with_call = {**with_tools, "messages": [SYSTEM, ask("one"), call]}
    lengths = [
        read(lines({"body": body})).input_tokens[0] for body in (bare, with_tools, with_call)
    ]
    assert lengths == sorted(set(lengths))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (lines({"messages": [SYSTEM]}) + "{\n", "2: no JSON; every line of this trace is"),
        ("[\n" + json.dumps(sharegpt("a", *TURNS)) + ",\n", "2: the file ends within its list"),
        ("[{]\n", "1: the file ends within its list, or is no JSON"),
        ('[{"a": 1}]\n', "1: no request: no object of the file has messages"),
        (
            lines({"messages": [SYSTEM], "startTime": "soon"}),
            "1: startTime is 'soon', and should be a time",
        ),
        (
            lines({"messages": [SYSTEM], "startTime": 1e9}, {"messages": [SYSTEM]}),
            "1 of 2 requests have a time",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_line(
    read: Callable[..., Trace], text: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=r"trace:") as caught:
        read(text)
    assert sentence in str(caught.value)


def test_text_needs_a_tokenizer(read: Callable[..., Trace], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the tokenizer of the model"):
        read(lines({"messages": [SYSTEM]}), replace(OPTIONS, tokenizer=""))
    with pytest.raises(ConfigError, match="is no tokenizer.json, no directory with one"):
        read(lines({"messages": [SYSTEM]}), replace(OPTIONS, tokenizer=str(tmp_path)))


# -- lengths alone ---------------------------------------------------------------------------------

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.1805900,396,109\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,GPT-4,1087,230,1317,API log\n"
)


@pytest.mark.parametrize(
    ("text", "times", "inputs", "outputs"),
    [(AZURE, [0.0, 3.5], [374, 396], [44, 109]), (BURST, [0.0, 40.0], [472, 1087], [18, 230])],
)
def test_lengths_are_read_and_share_nothing(
    read: Callable[..., Trace], text: str, times: object, inputs: object, outputs: object
) -> None:
    trace = read(text)
    assert trace.times.tolist() == times
    assert trace.input_tokens.tolist() == inputs
    assert trace.output_tokens.tolist() == outputs
    assert not trace.has_contents
    assert len(set(trace.keys.tolist())) == trace.num_references


def test_a_bad_row_is_refused_by_its_line(read: Callable[..., Trace]) -> None:
    for row, sentence in (
        ("5,ChatGPT\n", "4: 2 columns, and fewer than the header has"),
        ("5,ChatGPT,many,18,490,API log\n", "4: input is 'many', and should be a number"),
        ("noon,ChatGPT,4,18,490,API log\n", "4: time is 'noon', and should be a time in seconds"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            read(BURST + row)


def test_lengths_get_the_answer_that_they_allow(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    done = kvtier("replay", str(path), "--no-report", "--json", "-", "--bytes-per-token", "1000")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["recommendation"]["text"]
    assert found.startswith("Which prompts begin alike is not in the trace")
    # 770 tokens of 1000 bytes in 3.5 s
    assert f"have {capacity(770 * 1000 * 3600 * 2 // 7)} of KV an hour" in found
    shown = " ".join(done.stderr.split())
    assert "Lengths alone do not tell what a cache would save." in shown
    assert "Hit ratio" not in shown
    report = tmp_path / "report.html"
    assert kvtier("replay", str(path), "--report", str(report)).exit_code == 0
    assert "Lengths alone do not tell" in report.read_text()


def test_a_text_becomes_a_recording_and_lengths_do_not(tmp_path: Path) -> None:
    path, to = tmp_path / "trace", tmp_path / "recording"
    path.write_text(lines({"messages": [SYSTEM, ask("one")]}, {"messages": [SYSTEM, ask("two")]}))
    record = ("record", str(path), "--to", str(to), "--block-tokens", "4")
    assert "--tokenizer" in refused(*record)
    done = kvtier(*record, "--tokenizer", TINY)
    assert done.exit_code == 0, done.output
    assert SYSTEM["content"] not in to.read_text()
    assert shared(read_traces([to], OPTIONS))[1] >= 2
    path.write_text(AZURE)
    to.unlink()
    assert "there is nothing to record of lengths" in refused(*record)
    assert not to.exists()


def test_a_file_that_is_absent_is_refused_without_a_bar(tmp_path: Path) -> None:
    done = kvtier("replay", str(tmp_path / "none"), "--no-report")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "No such file" in done.stderr


def test_a_file_that_is_no_trace_says_what_a_server_logs(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    path.write_text('10.0.0.1 - - [31/Jan/2026] "POST /v1/chat/completions HTTP/1.1" 200 512\n')
    told = refused("replay", str(path), "--no-report")
    assert "none of the known traces" in told
    assert "VLLM_LOGGING_LEVEL=DEBUG" in told
    assert "docs/" not in told
