"""Pack files of prompts: the first request of another engine loads them, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.config import CacheConfig
from kvtier.core.errors import ConfigError
from kvtier.core.types import DISK, LoadPolicy
from kvtier.observe import specs
from kvtier.serve.engine import Engine, EngineConfig
from kvtier.tiers.remote.bucket.pack_file import PackFile
from scripts.model_coverage import kinds, save
from tests.kit.cli import kvtier, refused

from .asking import ask, random_prompt, same

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

MODEL = "random-gqa"
SIZES = ["--block-size", "32", "--chunk-tokens", "64", "--threads", "1"]
NUM_TOKENS = 300
NUM_CACHED = 256
"""Tokens of the whole chunks of a prompt."""


def config(**settings: Any) -> EngineConfig:
    given: dict[str, Any] = {"host_capacity": "16MiB", "load_policy": LoadPolicy.ALWAYS}
    return EngineConfig(
        model=MODEL,
        block_size=32,
        chunk_tokens=64,
        device_capacity="8MiB",
        threads=1,
        cache=CacheConfig(**given | settings),
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random_prompt(seed, NUM_TOKENS) for seed in range(3)]


@pytest.fixture(scope="module")
def file(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    lines, made = folder / "prompts.jsonl", folder / "prompts.kvpack"
    lines.write_text("".join(json.dumps({"prompt": prompt}) + "\n\n" for prompt in prompts))
    done = kvtier("export", str(lines), str(made), "--model", MODEL, *SIZES, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["num_prompts"], result["num_tokens"]) == (3, 3 * NUM_TOKENS)
    assert result["num_blocks"] == 3 * NUM_CACHED // 32
    assert sorted(each.name for each in folder.iterdir()) == [lines.name, made.name]
    return made


def test_first_requests_load_a_file_as_a_store(prompts: list[list[int]], file: Path) -> None:
    new = random_prompt(7, NUM_TOKENS)
    with Engine(config()) as engine:
        cold = [ask(engine, prompt) for prompt in [*prompts, new]]
    with Engine(config(storage=(f"pack://{file}",), disk_path=str(file.parent / "disk"))) as engine:
        warm = [ask(engine, prompt) for prompt in [*prompts, new]]
        registry = engine.call(engine.cache.update_metrics).registry
        unwritten = registry.get_sample_value(f"{specs.UNWRITTEN_BLOCKS.name}", {"tier": "pack"})
        refused = registry.get_sample_value(f"{specs.REFUSED_BLOCKS.name}", {"tier": "pack"})
    assert [each.num_cached_tokens for each in cold] == [0] * 4
    assert [each.hit_tokens for each in warm] == [{"pack": NUM_CACHED}] * 3 + [{}]
    assert all(map(same, cold, warm))
    assert not unwritten, "nothing is written to a file that is only read"
    assert not refused
    with Engine(config(disk_path=str(file.parent / "disk"))) as engine:
        assert ask(engine, new).hit_tokens == {DISK: NUM_CACHED}, "written to the other storage"


def test_a_file_is_imported_into_the_disk_of_an_engine(
    prompts: list[list[int]], file: Path, tmp_path: Path
) -> None:
    place = f"disk:{tmp_path / 'disk'}"
    assert "give a larger --disk-capacity" in refused("import", str(file), place)
    assert "give a larger --disk-capacity" in refused(
        "import", str(file), place, "--disk-capacity", "64KiB"
    )
    assert not (tmp_path / "disk").exists()
    assert kvtier("import", str(file), place, "--disk-capacity", "16MiB").exit_code == 0
    settings = config(disk_path=str(tmp_path / "disk"), disk_capacity="16MiB")
    with Engine(config()) as engine:
        cold = ask(engine, prompts[0])
    with Engine(settings) as engine:
        warm = ask(engine, prompts[0])
        assert warm.hit_tokens == {DISK: NUM_CACHED}
        assert same(cold, warm)
        assert "in use by process" in refused("import", str(file), place)
    done = kvtier("import", str(file), place)
    assert "there already: 24 blocks" in done.stdout, done.output


@pytest.mark.parametrize("kind", ["gemma3_text", "lfm2"])
def test_windows_and_recurrent_states_are_in_a_file(
    prompts: list[list[int]], tmp_path: Path, kind: str
) -> None:
    model, lines, made = tmp_path / "model", tmp_path / "prompts.jsonl", tmp_path / "a.kvpack"
    save(kind, kinds().get(kind, kind), model)
    lines.write_text(json.dumps({"prompt": prompts[0]}))
    assert kvtier("export", str(lines), str(made), "--model", str(model), *SIZES).exit_code == 0
    place, capacity = str(tmp_path / "disk"), "16MiB"
    words = ["import", str(made), f"disk:{place}", "--disk-capacity", capacity]
    assert kvtier(*words).exit_code == 0
    answers = []
    for changes in (
        {},
        {"storage": (f"pack://{made}",)},
        {"disk_path": place, "disk_capacity": capacity},
    ):
        with Engine(replace(config(**changes), model=str(model))) as engine:
            answers.append(ask(engine, prompts[0]))
    assert [each.hit_tokens for each in answers] == [{}, {"pack": NUM_CACHED}, {DISK: NUM_CACHED}]
    assert all(same(each, answers[0]) for each in answers)


def test_a_file_is_imported_into_an_encrypted_disk(
    prompts: list[list[int]], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("DISK_KEY", "01" * 32)
    given = ["--disk-capacity", "16MiB", "--encryption-key", "env:DISK_KEY"]
    assert kvtier("import", str(file), f"disk:{tmp_path / 'disk'}", *given).exit_code == 0
    place = {"disk_path": str(tmp_path / "disk"), "disk_capacity": "16MiB"}
    with Engine(config(**place, encryption_key="env:DISK_KEY")) as engine:
        assert ask(engine, prompts[0]).hit_tokens == {DISK: NUM_CACHED}


def test_a_slab_of_another_layout_is_refused(
    prompts: list[list[int]], file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    other = replace(config(disk_path=str(folder), disk_capacity="16MiB"), block_size=64)
    with Engine(other) as engine:
        ask(engine, prompts[0])
    message = refused("import", str(file), f"disk:{folder}")
    assert "holds a different slab" in message
    assert '"block_size":64' in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "random-mla"}, "KV of random-gqa, and this is random-mla: it has the weights"),
        ({"dtype": "bfloat16"}, "the dtype 'float32' and not 'bfloat16'"),
        ({"chunk_tokens": 32}, "chunk_tokens '64' and not '32'"),
        ({"block_size": 64}, "block_size '32' and not '64'"),
    ],
)
def test_an_engine_refuses_the_kv_of_another(
    file: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(replace(config(storage=(f"pack://{file}",)), **changes))


def test_chats_are_exported_as_the_server_renders_them(tmp_path: Path) -> None:
    chat: dict[str, list[Any]] = {
        "messages": [{"role": "system", "content": "Answer in short sentences. " * 40}],
        "tools": [{"type": "function", "function": {"name": "search", "parameters": {}}}],
    }
    lines, made = tmp_path / "chats.jsonl", tmp_path / "chats.kvpack"
    lines.write_text(json.dumps(chat))
    assert kvtier("export", str(lines), str(made), "--model", "kvtier-tiny").exit_code == 0
    identity = PackFile(made).index.identity
    assert identity is not None
    assert identity.model == "kvtier-tiny"
    cache = CacheConfig(host_capacity="64MiB", storage=(f"pack://{made}",))
    with Engine(EngineConfig(model="kvtier-tiny", threads=1, cache=cache)) as engine:
        asked = [*chat["messages"], {"role": "user", "content": "Who are you?"}]
        text = engine.tokenizer.render_chat(asked, chat["tools"])
        assert ask(engine, engine.tokenizer.encode(text)).num_cached_tokens >= 128


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "has no prompt"),
        ("\n \n", "has no prompt"),
        ("{", "line 1: is no JSON"),
        ("[1, 2]", 'has neither "prompt" nor "messages"'),
        ('{"prompt": "a", "messages": []}', 'has neither "prompt" nor "messages", or both'),
        ('{"prompt": [1, -1]}', "neither a text nor a list of token ids"),
        ('{"prompt": [true]}', "neither a text nor a list of token ids"),
        ('{"prompt": "short"}', "only whole chunks of 64 are kept"),
        (json.dumps({"prompt": [5] * 100_000}), "there is room for"),
        ('{"messages": []}', "line 1: "),
        ('{"messages": [{"role": "nobody", "content": "x"}]}', "line 1: "),
    ],
)
def test_prompts_that_cannot_be_exported_are_refused(
    tmp_path: Path, content: str, reason: str
) -> None:
    lines, made = tmp_path / "prompts.jsonl", tmp_path / "prompts.kvpack"
    lines.write_text(content)
    assert reason in refused("export", str(lines), str(made), "--model", MODEL, *SIZES)
    assert [each.name for each in tmp_path.iterdir()] == [lines.name]


def test_one_bad_prompt_is_found_before_any_is_computed(
    tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps({"prompt": prompts[0]}) + '\n{"prompt": "short"}')

    def submit(*arguments: object, **named: object) -> None:
        pytest.fail("a prompt was computed")

    monkeypatch.setattr(Engine, "submit", submit)
    message = refused("export", str(lines), str(tmp_path / "a.kvpack"), "--model", MODEL, *SIZES)
    assert "line 2" in message


def test_prompts_need_a_model_and_a_file(tmp_path: Path) -> None:
    assert "give --model" in refused("export", str(tmp_path / "none"), str(tmp_path / "a"))
    message = refused("export", str(tmp_path / "none"), str(tmp_path / "a"), "--model", MODEL)
    assert "No such file" in message
