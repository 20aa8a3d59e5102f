"""Models of the Hugging Face hub: what is downloaded, what is kept, and what is refused."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.core.errors import ConfigError
from kvtier.serve.engine.model_names import BUILTIN, find_local, find_model
from tests.kit.hub import TOKEN, Hub, hub
from tests.kit.servers import free_port

pytestmark = pytest.mark.engine
huggingface_hub = pytest.importorskip("huggingface_hub")

TINY, PICKLED, GATED = "someone/tiny", "someone/pickled", "someone/gated"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    tiny = shutil.copytree(BUILTIN / "kvtier-tiny", folder / "tiny")
    for name in ("pytorch_model.bin", "tiny.gguf", "consolidated.safetensors", "original/a.json"):
        (tiny / name).parent.mkdir(exist_ok=True)
        (tiny / name).write_bytes(b"never read")
    pickled = folder / "pickled"
    pickled.mkdir()
    for name in ("config.json", "pytorch_model.bin", "training_args.bin"):
        (pickled / name).write_text(name)
    return {TINY: tiny, PICKLED: pickled, GATED: tiny}


@pytest.fixture
def server(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with hub(models, frozenset({GATED})) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield found


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def refusal(name: str, revision: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        find_model(name, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_only_files_that_the_engine_reads_are_downloaded(
    server: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        found = find_model(TINY)
    assert isinstance(found, Path)
    assert found.name == server.commit(TINY)
    own = {path.name for path in (BUILTIN / "kvtier-tiny").iterdir()} - {"README.md"}
    assert {path.name for path in found.iterdir()} == own == set(server.downloaded)
    for name in own:
        assert (found / name).read_bytes() == (BUILTIN / "kvtier-tiny" / name).read_bytes()
    assert f"revision={server.commit(TINY)}" in caplog.text


def test_pickled_weights_are_downloaded_where_there_are_no_others(server: Hub) -> None:
    find_model(PICKLED)
    assert sorted(server.downloaded) == ["config.json", "pytorch_model.bin"]


def test_what_is_in_the_cache_is_not_downloaded_again(server: Hub) -> None:
    first = find_model(TINY)
    server.downloaded.clear()
    assert find_model(TINY, server.commit(TINY)) == find_model(TINY) == first
    assert server.downloaded == []


def test_the_cache_serves_without_the_hub(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = find_model(TINY)
    num_requests = server.num_requests
    go_offline(monkeypatch)
    assert find_model(TINY) == first
    assert server.num_requests == num_requests
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert find_model(TINY) == first  # nothing listens there


def test_a_cache_that_lacks_weights_is_refused_offline(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_model(TINY)
    assert isinstance(found, Path)
    (found / "model.safetensors").unlink()
    go_offline(monkeypatch)
    assert "or not all of it" in refusal(TINY)


def test_refusals_say_what_to_do(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "check the name, or set HF_TOKEN" in refusal("someone/absent")
    assert "set HF_TOKEN to a token that may read it" in refusal(GATED)
    assert "has no revision 'v9'" in refusal(TINY, "v9")
    assert server.downloaded == []
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert isinstance(find_model(GATED), Path)
    go_offline(monkeypatch)
    assert "HF_HUB_OFFLINE forbids to download it" in refusal(TINY)


def test_a_hub_that_is_not_there_is_named(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    assert f"can't be downloaded from {url} (ConnectError" in refusal(TINY)


def test_a_disk_without_space_is_refused_before_and_during_a_download(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        full = shutil.disk_usage("/")._replace(free=1 << 10)
        patched.setattr(shutil, "disk_usage", lambda _: full)
        assert "0.0 GiB left; free some, or set HF_HOME" in refusal(TINY)
    assert server.downloaded == []

    def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub._snapshot_download, "hf_hub_download", fill)
    assert "was full before 'someone/tiny' was downloaded" in refusal(TINY)


def test_a_folder_takes_precedence_and_has_no_revision(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(BUILTIN / "kvtier-tiny", tmp_path / TINY)
    assert find_local(TINY) == Path(TINY)
    assert find_local("someone/other") is None
    assert "leave it out" in refusal(TINY, "main")
    (tmp_path / TINY / "config.json").unlink()
    assert "nor a name of the Hugging Face hub (OWNER/NAME)" in refusal(TINY)
    assert server.num_requests == 0


def test_doctor_loads_a_model_of_the_hub(server: Hub, tmp_path: Path) -> None:
    variables = {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "kvtier.tools.cli", "doctor", "--model", TINY, "--json"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"found": "yes"' in done.stdout.partition('"model"')[2].partition('"served"')[2]
    assert "model.safetensors" in server.downloaded
