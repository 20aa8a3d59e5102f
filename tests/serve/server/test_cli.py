"""The commands: fast imports, and one sentence for each error of use."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from kvtier.core.errors import install_command
from kvtier.tools.cli.failure import starting
from tests.kit.cli import kvtier, refused


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys, kvtier.tools.cli; print({'torch', 'fastapi', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_help_lists_the_commands() -> None:
    shown = kvtier("--help").output
    assert all(command in shown for command in ("serve", "doctor", "bench"))
    assert kvtier("serve", "--help").exit_code == 0


def test_the_version_is_told() -> None:
    assert kvtier("--version").output.startswith("kvtier 0.")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--api-key", ""], "--api-key: the key is empty"),
        (["--max-body-bytes", "many"], "--max-body-bytes: can't read 'many' as a size"),
        (["--device-capacity", "1KiB"], "--device-capacity: 0.0 MiB is room for 0 blocks"),
        (["--storage", "/path"], "--storage: '/path' names no plug-in; write it as \"plug-in:loc"),
        (["--storage", "a b:/path"], "--storage: 'a b:/path' names no plug-in"),
        (["--storage", "disk:"], 'disk: no folder; write it as "disk=disk:/path"'),
        (
            ["--storage", "disk:/dev/null"],
            "disk tier: /dev/null can't be created or is not a directory",
        ),
        (["--storage", "disk:/x", "--disk-path", "/y"], "--storage: two tiers are called 'disk'"),
        (["--storage-capacity", "much"], "--storage-capacity: can't read 'much' as a size"),
        (["--block-size", "0"], "--block-size: 0 is below 1"),
        (["--chunk-tokens", "100"], "--chunk-tokens: 100 is no multiple of --block-size=64"),
        (["--max-running", "0"], "--max-running: 0 is below 1"),
        (["--device", "toaster"], "--device: 'toaster' is unknown"),
        (
            ["--disk-path", "unused", "--disk-direct", "off", "--host-capacity", "0"],
            "--disk-direct: off sends blocks through host memory, and there is none",
        ),
        (["--shutdown-grace-s", "-1"], "--shutdown-grace-s: -1.0 is no number of seconds"),
        (["--shutdown-grace-s", "nan"], "--shutdown-grace-s: nan is no number of seconds"),
        (["--max-connections", "0"], "--max-connections: 0 is below 1"),
        (["--header-timeout-s", "0"], "--header-timeout-s: 0.0 is no time to wait"),
        (["--body-timeout-s", "nan"], "--body-timeout-s: nan is no time to wait"),
        (["--write-timeout-s", "inf"], "--write-timeout-s: inf is no time to wait"),
        (["--events-replay", "tcp://127.0.0.1:5558"], "--events-replay: 'tcp://127.0.0.1:5558' wi"),
        (["--host", "no.such.host.invalid"], "--host: can't listen on 'no.such.host.invalid'"),
    ],
)
def test_a_setting_that_cant_be_used_is_told_in_one_sentence(
    options: list[str], sentence: str
) -> None:
    assert f"kvtier serve: {sentence}" in refused("serve", "--port", "0", *options)


MISSING = ("torch", "transformers", "fastapi")


def without_engine(*arguments: str, missing: Sequence[str] = MISSING) -> list[str]:
    """Run ``kvtier`` without the modules that serving a model needs. Return what it complains."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({list(missing)}));"
        "from kvtier.tools.cli import app; app(sys.argv[1:], prog_name='kvtier')"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--eviction-policy", "newest"],
            "--eviction-policy: 'newest' is unknown; use one of runs, lru, arc, s3fifo, lfuda",
        ),
        (["--storage", "shelf:/path"], "no plug-in 'shelf' in kvtier.tiers; known: az, dir, disk"),
        (["--storage", "host=disk:/x"], "--storage: two tiers are called 'host'; name one of them"),
        (["--host-capacity", "4 apples"], "--host-capacity: can't read"),
        (["--device-capacity", "4 apples"], "--device-capacity: can't read"),
        (["--dtype", "int3"], "--dtype: 'int3' is unknown; use auto, float32, bfloat16, float16"),
        (["--port", "70000"], "--port: 70000 is no TCP port"),
        (["--threads", "-1"], "--threads: -1 is below 0"),
        (["--max-model-tokens", "-5"], "--max-model-tokens: -5 is below 0"),
        (["no-such-model"], "model: 'no-such-model' is neither built in"),
        (["--host-capacity", "900TiB"], "host tier: a capacity of 921600.00 GiB does not fit"),
        (["--host-capacity", "1000000x"], "host tier: a capacity of 250000.00 GiB does not fit"),
        (
            ["--disk-path", "{folder}", "--disk-capacity", "900TiB"],
            "disk tier: a capacity of 92160",
        ),
        (["--disk-path", "/dev/null/x"], "disk tier: /dev/null/x can't be created"),
        (["--disk-path", "{folder}/.."], "disk tier: {folder}/.. holds no slab"),
        (
            ["--disk-path", "{folder}", "--encryption-key", "env:NO_SUCH"],
            "--encryption-key: env:NO",
        ),
        (["--disk-path", "{folder}", "--codec", "zip"], "--codec: 'zip' is unknown"),
        (["--record", "/no/such/folder/trace"], "--record: there is no directory /no/such/folder"),
        (
            ["--record-max-bytes", "1", "--record", "{folder}"],
            "--record-max-bytes: 1 is below 1 MiB",
        ),
        (["--events", "5557"], "--events: can't publish at '5557'"),
        (["--storage", "pack:///no/such.kvpack"], "pack file /no/such.kvpack: No such file"),
    ],
)
def test_settings_are_checked_before_torch_is_imported(
    options: list[str], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "other").touch()
    folder = str(tmp_path / "folder")
    port = [] if "--port" in options else ["--port", "0"]
    options = [option.replace("{folder}", folder) for option in options]
    (line,) = without_engine("serve", *port, *options)
    assert line.startswith(f"kvtier serve: {sentence.replace('{folder}', folder)}")


@pytest.mark.parametrize(
    ("options", "package", "sentence"),
    [
        (["--storage", "s3://bucket"], "obstore", "--storage: s3: needs the package obstore; in"),
        (["--events", "tcp://127.0.0.1:0"], "zmq", "--events: "),
        (["--traces"], "opentelemetry", "--traces: "),
    ],
)
def test_missing_packages_are_named_before_torch_is_imported(
    options: list[str], package: str, sentence: str
) -> None:
    (line,) = without_engine("serve", "--port", "0", *options, missing=(*MISSING, package))
    assert line.startswith(f"kvtier serve: {sentence}")


@pytest.mark.engine
def test_a_device_that_is_not_there_is_named_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_model(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("kvtier.serve.engine.engine.load_model", load_model)
    said = refused("serve", "--port", "0", "--device", "npu:0")
    assert "the model was loaded" not in said
    assert "'npu:0'" in said


def test_loading_of_a_model_is_told_before_torch_is_imported() -> None:
    loading, _, missing = without_engine("serve", "--port", "0")
    assert loading.endswith("loading model name=kvtier-tiny")
    assert missing.startswith("kvtier serve: ")
    assert missing.endswith(f"; install what the engine needs: {install_command('engine')}")


@pytest.mark.engine
def test_an_empty_key_in_the_environment_is_no_open_door() -> None:
    said = refused("serve", "--port", "0", KVTIER_API_KEY="")
    assert "--api-key: the key is empty" in said


@pytest.mark.engine
def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("serve", "--port", str(port))
    assert f"--port: can't listen on 127.0.0.1:{port}" in said


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.engine
def test_a_port_that_is_taken_while_the_model_loads_is_told() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "kvtier.tools.cli", "serve", "--port", str(port)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert "loading model" in process.stderr.readline()
            other.listen()
            rest = process.stderr.read()
    assert process.returncode == 2
    assert f"kvtier serve: --port: can't listen on 127.0.0.1:{port}: Address already" in rest
    assert "Traceback" not in rest


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.parametrize("level", ["info", "debug"])
def test_an_unforeseen_error_of_a_start_is_one_sentence(level: str) -> None:
    # A stand-in for a library that fails unexpectedly at the start.
    code = (
        "import sys, kvtier.serve.engine.engine as made;"
        "made.load_model = lambda *_: {}['lm_head'];"
        "from kvtier.tools.cli import app; app(sys.argv[1:], prog_name='kvtier')"
    )
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--log-level", level]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "kvtier serve: can't start: KeyError: 'lm_head'; --log-level debug shows where it comes "
        "from"
    )
    assert ("Traceback" in done.stderr) == (level == "debug")


def test_an_error_after_the_start_is_raised_as_it_is() -> None:
    def run() -> None:
        with starting("serve") as complete:
            complete()
            raise KeyError("later")

    with pytest.raises(KeyError, match="later"):
        run()


@pytest.mark.engine
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_model_with_a_file_cut_off_is_one_sentence(tmp_path: Path, name: str) -> None:
    from tests.serve.engine.checkpoints import checkpoint

    model = checkpoint(tmp_path / "model")
    content = (model / name).read_bytes()
    (model / name).write_bytes(content[: len(content) // 2])
    said = refused("serve", str(model), "--port", "0", "--log-level", "error")
    assert said.startswith(f"kvtier serve: model: {'' if name[0] == 'g' else 'the '}")
    assert said.count("kvtier serve:") == 1
    assert str(model) in said


@pytest.mark.engine
def test_too_few_open_files_are_told() -> None:
    command = (
        f"ulimit -n 200; exec {sys.executable} -m kvtier.tools.cli serve --port 0 --host-capacity 0"
    )
    done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "kvtier serve: --max-connections: this process may open 200 files" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.engine
@pytest.mark.parametrize(
    ("address", "loops_back"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.7", False),
        ("fe80::1%eth0", False),
    ],
)
def test_only_this_machine_reaches_a_loopback_address(address: str, loops_back: bool) -> None:
    from kvtier.serve.server.listener import is_loopback

    class Listener:
        def getsockname(self) -> tuple[str, int]:
            return address, 8000

    assert is_loopback(cast(socket.socket, Listener())) == loops_back


@pytest.mark.engine
@pytest.mark.parametrize(
    ("loops_back", "key", "warns"),
    [(False, None, True), (False, "k", False), (True, None, False)],
)
def test_an_open_door_without_key_is_warned_of(
    loops_back: bool, key: str | None, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tools.cli.serving.is_loopback", lambda listener: loops_back)
    monkeypatch.setattr(
        "kvtier.serve.server.run.HttpServer.run", lambda self, tell, **rest: tell(self.url)
    )
    options = ["--device-capacity", "8MiB", "--host-capacity", "0"]
    options += [] if key is None else ["--api-key", key]
    result = kvtier("serve", "--port", "0", *options)
    assert result.exit_code == 0, result.output
    assert ("without an API key" in result.stderr) == warns
    assert result.stdout.startswith("kvtier serves kvtier-tiny on cpu at http://")
    assert len(result.stdout.splitlines()) == 1
