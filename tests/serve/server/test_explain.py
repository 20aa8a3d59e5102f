"""Explanations agree with the decisions that they explain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.cache.audit import Auditor
from kvtier.core.types import DEVICE, HOST
from kvtier.plan.explain import COMPUTED
from kvtier.serve.engine import Engine, EngineConfig
from kvtier.serve.server.config import ServerConfig
from tests.kit.cli import kvtier, refused

from .conftest import MODEL, Running, running
from .raw import error_of

pytestmark = pytest.mark.engine

YES = {"X-KVTier-Explain": "1"}


def ask(served: Running, body: dict[str, Any], path: str = "completions", **headers: str) -> Any:
    asked = {"model": MODEL, "max_tokens": 1, "temperature": 0, **body}
    answer = httpx.post(
        f"{served.url}/v1/{path}", json=asked, headers={**YES, **headers}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return answer


def explained(served: Running, prompt: str, **body: Any) -> dict[str, Any]:
    (found,) = ask(served, {"prompt": prompt, **body}).json()["usage"]["kvtier"]
    assert isinstance(found, dict)
    return found


def parts(found: dict[str, Any]) -> list[tuple[str, int]]:
    """Return each source with its number of tokens. Check that the parts are adjacent."""
    ends = [0, *(part["end"] for part in found["parts"])]
    assert [part["first"] for part in found["parts"]] == ends[:-1]
    assert ends[-1] == found["prompt_tokens"]
    return [(part["from"], part["end"] - part["first"]) for part in found["parts"]]


def test_a_prompt_is_computed_then_on_the_device_then_in_host_memory(
    served: Running, prefix: str
) -> None:
    prompt = prefix + "# three times"
    salt = "three times"
    found = [explained(served, prompt, cache_salt=salt) for _ in range(2)]
    assert served.engine.drain()
    served.engine.clear_tier(DEVICE)
    found.append(explained(served, prompt, cache_salt=salt))
    num, reused = found[0]["prompt_tokens"], found[1]["reused_tokens"]
    assert 0 < reused < num
    assert parts(found[0]) == [(COMPUTED, num)]
    assert parts(found[1]) == [(DEVICE, reused), (COMPUTED, num - reused)]
    assert parts(found[2]) == [(HOST, reused), (COMPUTED, num - reused)]
    assert "nothing of this prompt was found" in found[0]["notes"][0]
    host, computed = found[2]["parts"]
    assert host["took_s"] == found[2]["took"]["load_s"] > 0
    assert computed["took_s"] == found[2]["took"]["compute_s"] > 0
    assert computed["predicted_s"] == found[2]["predicted"]["compute_s"] > 0
    (nothing,) = found[2]["rejected"]
    assert nothing["reused_tokens"] == 0
    assert nothing["compute_s"] > computed["predicted_s"]
    chosen = found[2]["predicted"]
    assert nothing["compute_s"] >= chosen["compute_s"] + chosen["load_s"]
    assert found[2]["took"]["first_token_s"] >= computed["took_s"]


def test_the_end_of_a_stream_explains(served: Running, prefix: str) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        answer = ask(served, {"prompt": prefix, "stream": True, **options})
        events = answer.text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        *chunks, last = (json.loads(event.removeprefix("data: ")) for event in events[:-1])
        assert last["choices"] == []
        (found,) = last["usage"]["kvtier"]
        assert parts(found)
        assert all(("usage" in chunk) == bool(options) for chunk in chunks)


def test_each_prompt_of_a_request_is_explained_once(served: Running, prefix: str) -> None:
    usage = ask(served, {"prompt": ["short", prefix], "n": 2}).json()["usage"]
    assert [each["prompt_tokens"] for each in usage["kvtier"]] == [
        len(served.engine.tokenizer.encode(text)) for text in ("short", prefix)
    ]
    body = {"messages": [{"role": "user", "content": prefix}]}
    usage = ask(served, body, "chat/completions").json()["usage"]
    assert [each["prompt_tokens"] for each in usage["kvtier"]] == [usage["prompt_tokens"]]


def test_who_does_not_ask_gets_no_explanation(served: Running) -> None:
    for headers in ({}, {"X-KVTier-Explain": "0"}):
        answer = httpx.post(
            f"{served.url}/v1/completions",
            json={"model": MODEL, "prompt": "x", "max_tokens": 1},
            headers=headers,
        )
        assert "kvtier" not in answer.json()["usage"]


def test_a_header_that_says_neither_yes_nor_no_is_refused(served: Running) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    url, headers = f"{served.url}/v1/completions", {"X-KVTier-Explain": "please"}
    error = error_of(httpx.post(url, json=body, headers=headers), 400)
    assert error["message"] == (
        'X-KVTier-Explain is "please"; send 1 to have it, audit for an audit, too, or 0.'
    )


def test_an_answer_that_ends_at_a_stop_string_is_explained(served: Running, prefix: str) -> None:
    found = explained(served, prefix, max_tokens=64, stop=["e", "a", " ", "\n"])
    assert parts(found)


# -- the command -----------------------------------------------------------------------------------


def test_the_command_shows_a_table_that_says_it_all(
    served: Running, prefix: str, tmp_path: Any
) -> None:
    prompt = prefix + "# shown"
    explained(served, prompt)
    assert served.engine.drain()
    served.engine.clear_tier(DEVICE)
    file = tmp_path / "prompt"
    file.write_text(prompt)
    shown = kvtier("explain", served.url, "--prompt-file", str(file), COLUMNS="200")
    assert shown.exit_code == 0, shown.output
    text = shown.stdout
    found = explained(served, prompt)  # the same prompt again: all of it is now on the device
    num, reused = found["prompt_tokens"], found["reused_tokens"]
    assert f"{MODEL} at {served.url}: {num:,} tokens, {reused:,} of them reused" in text
    assert f"0-{reused - 1:,}" in text
    assert "host memory" in text
    assert f"{reused:,}-{num - 1:,}" in text
    assert f"Loading {reused:,} tokens took" in text
    assert "Compared with reusing nothing: about" in text
    assert prompt.split()[1] not in text


def test_the_command_reads_stdin_and_prints_json(served: Running) -> None:
    shown = kvtier("explain", f"{served.url}/v1/", "--json", stdin="some words")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["parts"][0]["from"] == COMPUTED


def test_the_command_has_a_key_and_a_salt(engine: Engine) -> None:
    with running(engine, ServerConfig(api_key="k")) as made:
        assert "refuses" in kvtier("explain", made.url, stdin="x").stderr
        for salt, num in (("a", 0), ("a", 1), ("b", 0)):
            shown = kvtier(
                "explain",
                made.url,
                "--salt",
                salt,
                "--json",
                stdin="words " * 400,
                KVTIER_API_KEY="k",
            )
            assert (json.loads(shown.stdout)["reused_tokens"] > 0) == num


@pytest.mark.parametrize(
    ("url", "text", "sentence"),
    [
        ("ftp://h", "x", "URL: 'ftp://h' is no address of a server; give http://host:port"),
        ("http://127.0.0.1:1", "x", "url: http://127.0.0.1:1/v1/models does not answer"),
        (None, "", "--prompt-file: the prompt is empty"),
        (None, "too long " * 100_000, "refuses: The prompt has"),
    ],
)
def test_what_the_command_cant_do_is_told_in_one_sentence(
    served: Running, url: str | None, text: str, sentence: str
) -> None:
    shown = kvtier("explain", url or served.url, stdin=text)
    assert (shown.exit_code, len(shown.stderr.splitlines())) == (2, 1)
    assert sentence in shown.stderr


def test_a_prompt_that_is_no_text_is_told(served: Running, tmp_path: Any) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(b"\xff\xfe")
    for path, sentence in ((file, "byte 0 is not UTF-8"), (tmp_path / "no", "No such file")):
        assert sentence in refused("explain", served.url, "--prompt-file", str(path))


def test_prompts_are_audited_on_demand(served: Running, prefix: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    asked: list[dict[str, Any]] = [
        {"prompt": prefix + "# on demand"},
        {"body": {"messages": [{"role": "user", "content": prefix + "# in a chat"}]}},
        {"prompt": "too short to be cached"},
    ]
    file.write_text("\n".join(map(json.dumps, asked)))
    shown = kvtier("audit", served.url, str(file), "--salt", "on demand")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.endswith(": 3 prompts: 2 equal, 1 not audited\n")
    file.write_text(prefix + "# as text")
    shown = kvtier("audit", served.url, str(file), "--json")
    assert json.loads(shown.stdout) == {"prompts": 1, "outcomes": {"equal": 1}}


def test_difference_found_on_demand_is_told_by_the_exit_status(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(prefix)
    config = EngineConfig(model=MODEL, device_capacity="32MiB", threads=1)
    with Engine(config) as own, running(own) as made:
        explained(made, prefix)
        judge = Auditor.judge
        monkeypatch.setattr(
            Auditor, "judge", lambda self, distances, piece: judge(self, distances + 1, piece)
        )
        shown = kvtier("audit", made.url, str(file))
    assert shown.exit_code == 1
    assert shown.stdout.endswith(": 1 prompts: 1 different\n")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "there is no prompt in it"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b"{}", "line 1 is no JSON object with either prompt or messages"),
        (b'{"prompt": "x"}\n{"prompt": ', "line 2 is no JSON object"),
        (b'{"body": 3}', "line 1 is no JSON object"),
    ],
)
def test_files_without_prompts_are_refused(
    served: Running, tmp_path: Path, content: bytes, sentence: str
) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    assert sentence in refused("audit", served.url, str(file))


def test_missing_file_is_refused(served: Running, tmp_path: Path) -> None:
    said = refused("audit", served.url, str(tmp_path / "prompts"))
    assert "prompts: can't be read: No such file or directory" in said
