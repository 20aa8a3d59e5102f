"""``kvtier import`` into a running server: into its store, and from there into its memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kvtier.core.config import CacheConfig
from kvtier.serve.engine import Engine, EngineConfig
from kvtier.serve.server.config import ServerConfig
from kvtier.tools.cli.api_keys import CONTROL_KEY_VARIABLE
from tests.kit.cli import kvtier, refused
from tests.kit.waiting import wait_until

from .conftest import MODEL, Running, cached, running

KEY = "the-key-of-the-control"
TEXT = "one " * 300


@contextmanager
def started(stores: Sequence[str], chunk_tokens: int = 64) -> Iterator[Running]:
    config = EngineConfig(
        model=MODEL,
        block_size=32,
        chunk_tokens=chunk_tokens,
        device_capacity="16MiB",
        threads=1,
        cache=CacheConfig(host_capacity="16MiB", storage=tuple(stores)),
    )
    with Engine(config) as engine, running(engine, ServerConfig(control_key=KEY)) as made:
        yield made


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("import")
    (folder / "prompt.txt").write_text(TEXT)
    made = folder / "prompt.kvpack"
    sizes = ["--block-size", "32", "--chunk-tokens", "64", "--threads", "1"]
    words = ["export", str(folder / "prompt.txt"), str(made), "--model", MODEL, *sizes]
    assert kvtier(*words).exit_code == 0
    return made


def test_a_running_server_takes_a_file_into_its_store_and_memory(
    file: Path, tmp_path: Path
) -> None:
    with started([f"near=dir://{tmp_path}/kv?poll_s=0.1&publish_s=0.1"]) as served:
        done = kvtier("import", str(file), served.url, "--json", **{CONTROL_KEY_VARIABLE: KEY})
        assert done.exit_code == 0, done.output
        result = json.loads(done.stdout)
        num_blocks = result["num_copied"]
        assert result["store"] == "near"
        assert num_blocks > 0

        def bring() -> bool:
            answer = httpx.post(
                f"{served.url}/prefetch",
                json={"prompt": TEXT},
                headers={"Authorization": f"Bearer {KEY}"},
            )
            return bool(answer.json()["in_memory"] == num_blocks)

        wait_until(bring)
        with served.client() as client:
            usage = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=1).usage
        assert cached(usage) > 0


def test_a_running_server_refuses_what_it_can_not_use(file: Path, tmp_path: Path) -> None:
    environment = {CONTROL_KEY_VARIABLE: KEY}
    with started([f"dir://{tmp_path}/kv"], chunk_tokens=32) as served:
        message = refused("import", str(file), served.url, **environment)
        assert "chunk_tokens '64' and not '32'" in message
        message = refused("import", str(tmp_path / "none"), served.url, **environment)
        assert "No such file" in message
        message = refused("import", str(file), served.url, **{CONTROL_KEY_VARIABLE: "another"})
        assert "key is wrong" in message
    assert not (tmp_path / "kv" / "packs").exists()
    with started([f"file=pack://{file}"]) as served:
        assert "has no store to import into" in refused(
            "import", str(file), served.url, **environment
        )


def test_a_deletion_is_not_complete_while_a_file_has_the_blocks(file: Path) -> None:
    """They are not found any more, and others in the file are: its look-ups go on."""

    def num_cached(text: str) -> int:
        with served.client() as client:
            usage = client.completions.create(model=MODEL, prompt=text, max_tokens=1).usage
        assert served.engine.drain()
        served.engine.clear_tier("device")
        served.engine.clear_tier("host")
        return cached(usage)

    with started([f"file=pack://{file}"]) as served:
        assert num_cached(TEXT) > 0
        body = {"prompt": "two " * 300}
        headers = {"Authorization": f"Bearer {KEY}"}
        done = httpx.post(f"{served.url}/delete", json=body, headers=headers, timeout=60).json()
        assert not done["is_complete"]
        assert "file: is only read" in done["problems"][0]
        assert num_cached(TEXT) > 0
        body = {"prompt": TEXT}
        done = httpx.post(f"{served.url}/delete", json=body, headers=headers, timeout=60).json()
        assert [problem.partition(":")[0] for problem in done["problems"]] == ["file"]
        assert num_cached(TEXT) == 0
