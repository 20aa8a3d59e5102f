"""The commands at the heads of the files in deploy/ run as they stand.

What they call and what would change this machine (Docker, kubectl, systemctl, install, pip) is in
the shell's place of a function that writes down what it was given; ``kvtier`` and the shell itself
are real.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from kvtier.connectors.common.environment import asked, settings_in_environment
from kvtier.connectors.vllm.shared.settings import VllmSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMMAND = re.compile(r"^#   (\S.*|  .*)$", re.MULTILINE)
HEADS = {
    path.relative_to(DEPLOY).as_posix(): "\n".join(found)
    for path in sorted(DEPLOY.rglob("*"))
    if path.is_file() and (found := COMMAND.findall(path.read_text(encoding="utf-8")))
}
PRELUDE = r"""
note() { printf '%s\0' "$@" '' >>"$CALLS"; printf '\n' >>"$CALLS"; }
kubectl() { note kubectl "$@"; }
install() { note install "$@"; }
systemctl() { note systemctl "$@"; }
systemd-sysusers() { note systemd-sysusers "$@"; }
python3() { note python3 "$@"; }
/opt/kvtier/bin/pip() { note pip "$@"; }
docker() {
    if [ "$1 $2 $3 $4" = "run --rm --entrypoint kvtier" ]; then
        shift 5  # kvtier in a container is the one that is tested
        "$PYTHON" -m kvtier.tools.cli "$@"
    else
        note docker "$@"
    fi
}
"""


def run(script: str, calls: Path) -> list[list[str]]:
    """Return what the commands of ``script`` passed to other programs, in order."""
    calls.write_bytes(b"")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", PRELUDE + script],
        cwd=ROOT,
        env={**os.environ, "CALLS": str(calls), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = calls.read_text(encoding="utf-8").split("\0\0\n")[:-1]
    return [line.split("\0") for line in lines]


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls"


def test_every_head_with_commands_is_known() -> None:
    assert sorted(HEADS) == [
        "compose/compose.yaml",
        "compose/node.yaml",
        "docker/server.Dockerfile",
        "docker/vllm.Dockerfile",
        "kubernetes/kustomization.yaml",
        "kubernetes/node.yaml",
        "kubernetes/server.yaml",
        "systemd/kvtier-node.service",
        "systemd/kvtier.service",
    ]


@pytest.mark.parametrize("name", ["server", "vllm"])
def test_images_are_built_of_what_is_there(name: str, calls: Path) -> None:
    docker, build, option, file, *_, context = run(HEADS[f"docker/{name}.Dockerfile"], calls)[0]
    assert (docker, build, option, context) == ("docker", "build", "-f", ".")
    assert (ROOT / file).samefile(DEPLOY / f"docker/{name}.Dockerfile")


def test_vllm_in_a_container_is_asked_by_a_variable(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, started = run(HEADS["docker/vllm.Dockerfile"], calls)
    image = build[build.index("-t") + 1]
    assert started[:4] == ["docker", "run", "--gpus", "all"]
    option, variable, *rest = started[4:]
    assert (option, rest) == ("--env", [image, "MODEL"])
    monkeypatch.setenv(*variable.split("="))
    assert asked() == ["KVTIER_HOST_CAPACITY"]
    assert VllmSettings.read(settings_in_environment(VllmSettings)).host_capacity == "64GiB"


@pytest.mark.parametrize("name", ["compose/compose.yaml", "compose/node.yaml"])
def test_compose_starts_what_is_there(name: str, calls: Path) -> None:
    (started,) = run(HEADS[name], calls)
    assert started[:2] == ["docker", "compose"]
    assert (ROOT / started[started.index("-f") + 1]).samefile(DEPLOY / name)
    text = (DEPLOY / name).read_text(encoding="utf-8")
    needed = set(re.findall(r"\$\{(\w+):\?", text))
    exported = HEADS[name].splitlines()[0].split()[1:]
    assert {each.split("=")[0] for each in exported} == needed


def test_kubernetes_is_given_what_the_manifests_name(calls: Path) -> None:
    (applied,) = run(HEADS["kubernetes/kustomization.yaml"], calls)
    assert applied[:3] == ["kubectl", "apply", "--kustomize"]
    folder = ROOT / applied[3]
    settings = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert all((folder / each).is_file() for each in settings["resources"])
    namespace, secret = run(HEADS["kubernetes/server.yaml"], calls)
    assert namespace == ["kubectl", "create", "namespace", settings["namespace"]]
    assert secret[:4] == ["kubectl", "-n", settings["namespace"], "create"]
    name, *literals = secret[6:]
    keys = {literal.removeprefix("--from-literal=").partition("=")[0] for literal in literals}
    manifests = list(yaml.safe_load_all((folder / "server.yaml").read_text()))
    (found,) = (manifest for manifest in manifests if manifest["kind"] == "StatefulSet")
    (container,) = found["spec"]["template"]["spec"]["containers"]
    wanted = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each]
    (monitor,) = yaml.safe_load_all((folder / "monitor.yaml").read_text())
    wanted += [each["authorization"]["credentials"] for each in monitor["spec"]["endpoints"]]
    assert {each["name"] for each in wanted} == {name}
    assert {each["key"] for each in wanted} == keys


UNITS = {
    "kvtier": ("serve.env", "EnvironmentFile={}", "ExecStart={}/bin/kvtier serve"),
    "kvtier-node": ("node.toml", "--config {}", "ExecStart={}/bin/kvtier node run"),
}


@pytest.mark.parametrize("name", UNITS)
def test_systemd_is_installed_from_what_is_there(name: str, calls: Path) -> None:
    settings, reads, starts = UNITS[name]
    head = HEADS[f"systemd/{name}.service"]
    done = run(head, calls)
    copies = [each for each in done if each[0] == "install"]
    sources = {(ROOT / copy[-2]).resolve() for copy in copies}
    folder = DEPLOY / "systemd"
    assert sources == {folder / f"{name}.service", folder / "kvtier.sysusers", folder / settings}
    unit = (folder / f"{name}.service").read_text(encoding="utf-8")
    (target,) = (copy[-1] for copy in copies if "/etc/kvtier" in copy[-1])
    assert reads.format(target) in unit
    made = next(each[-1] for each in done if each[:3] == ["python3", "-m", "venv"])
    assert starts.format(made) in unit
    guide = (ROOT / "docs/guides/deploying.md").read_text(encoding="utf-8")
    assert head in guide


def test_a_node_in_kubernetes_is_given_what_the_manifest_names(calls: Path) -> None:
    applied, secret = run(HEADS["kubernetes/node.yaml"], calls)
    assert applied[:3] == ["kubectl", "apply", "-f"]
    assert (ROOT / applied[3]).samefile(DEPLOY / "kubernetes/node.yaml")
    manifests = list(yaml.safe_load_all((ROOT / applied[3]).read_text()))
    (namespace,) = (manifest for manifest in manifests if manifest["kind"] == "Namespace")
    assert secret[:4] == ["kubectl", "-n", namespace["metadata"]["name"], "create"]
    name, literal = secret[6:]
    (engine,) = (manifest for manifest in manifests if manifest["kind"] == "Deployment")
    (container,) = engine["spec"]["template"]["spec"]["containers"]
    (wanted,) = (each["valueFrom"]["secretKeyRef"] for each in container["env"])
    assert wanted == {
        "name": name,
        "key": literal.removeprefix("--from-literal=").partition("=")[0],
    }


def test_an_image_is_healthy_while_its_port_answers() -> None:
    text = (DEPLOY / "docker/server.Dockerfile").read_text(encoding="utf-8")
    (found,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", text, re.MULTILINE)
    command = [sys.executable, *json.loads(found)[1:]]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        here = [each.replace("8000", port) for each in command]
        assert here != command
        assert subprocess.run(here, check=False).returncode == 0
    ended = subprocess.run(here, check=False, capture_output=True)
    assert ended.returncode == 1
