"""The files in deploy/ say nothing that kvtier does not know."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]
from typer.testing import CliRunner

from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.core.config import parse_size
from kvtier.node.config import NodeConfig
from kvtier.tools.cli import app
from kvtier.tools.cli.api_keys import KEY_VARIABLE

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVER = DEPLOY / "docker/server.Dockerfile"


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def documents(path: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / path).read_text()))


def container(path: str) -> Any:
    (found,) = (document for document in documents(path) if document["kind"] == "StatefulSet")
    (only,) = found["spec"]["template"]["spec"]["containers"]
    return only


def service() -> dict[str, str]:
    """The settings of the unit; those that are given twice, joined."""
    found: dict[str, str] = {}
    for line in (DEPLOY / "systemd/kvtier.service").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found[name] = f"{found[name]} {value}" if name in found else value
    return found


def environment() -> dict[str, str]:
    lines = (DEPLOY / "systemd/serve.env").read_text().splitlines()
    pairs = (line.split("=", 1) for line in lines if not line.startswith("#"))
    return {name: value.strip('"') for name, value in pairs}


def _unit_command() -> list[str]:
    words = service()["ExecStart"].split()[1:]
    given = environment()["KVTIER_OPTIONS"].split()
    return [each for word in words for each in (given if word == "$KVTIER_OPTIONS" else [word])]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every ``kvtier serve``, by where it stands."""
    last = SERVER.read_text().split("CMD ")[-1]
    yield "image", json.loads(last)
    yield "compose", load("compose/compose.yaml")["services"]["server"]["command"]
    yield "kubernetes", container("kubernetes/server.yaml")["args"]
    yield "systemd", _unit_command()


@pytest.mark.parametrize(("where", "words"), list(commands()), ids=lambda each: str(each)[:10])
def test_every_command_is_one_that_kvtier_knows(where: str, words: list[str]) -> None:
    assert words[0] == "serve"
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = serve.make_context("serve", list(words[1:])).params
    for name in ("device_capacity", "host_capacity", "disk_capacity"):
        assert parse_size(options[name].replace("2x", "1"), name) > 0
    assert options["disk_path"] == ["/var/lib/kvtier/slab"]
    assert options["port"] == 8000
    # What other machines reach has a key.
    assert (options["host"] == "127.0.0.1") == (where == "systemd")


# -- a node and its engines ------------------------------------------------------------------------


def nodes() -> Iterator[tuple[str, list[str]]]:
    """Every ``kvtier node run``, by where it stands."""
    yield "compose", load("compose/node.yaml")["services"]["node"]["command"]
    yield "kubernetes", of_kind("DaemonSet")["containers"][0]["args"]
    unit = (DEPLOY / "systemd/kvtier-node.service").read_text()
    (line,) = re.findall(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)
    settings = str(DEPLOY / "systemd/node.toml")
    yield "systemd", [settings if each.endswith(".toml") else each for each in line.split()]


def of_kind(kind: str) -> Any:
    """Return the pod of the only object of a kind in the node's manifest."""
    (found,) = (
        document for document in documents("kubernetes/node.yaml") if document["kind"] == kind
    )
    return found["spec"]["template"]["spec"]


def node_options(words: list[str]) -> NodeConfig:
    assert words[:2] == ["node", "run"]
    node = typer.main.get_command(app).commands["node"]  # type: ignore[attr-defined]
    given = node.commands["run"].make_context("run", list(words[2:])).params
    names = ("socket", "host_capacity", "segment_capacity", "disk_path", "disk_capacity")
    return NodeConfig(**{name: given[name] for name in names}, control_port=given["control_port"])


@pytest.mark.parametrize(("where", "words"), list(nodes()), ids=lambda each: str(each)[:10])
def test_every_node_can_start_with_its_options(where: str, words: list[str]) -> None:
    config = node_options(words)
    assert config.socket == Path("/run/kvtier/node.sock")
    assert config.segment_bytes * 16 <= config.host_bytes
    assert config.disk_path.startswith("/var/lib/kvtier")


def test_engines_name_the_socket_of_their_node() -> None:
    """And find it in a folder that both have mounted."""
    services = load("compose/node.yaml")["services"]
    pods = of_kind("DaemonSet"), of_kind("Deployment")
    engines = [services["one"]["command"], services["other"]["command"]]
    engines.append(pods[1]["containers"][0]["args"])
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    for words in engines:
        assert words[0] == "serve"
        given = serve.make_context("serve", list(words[1:])).params
        assert given["node"] == "/run/kvtier/node.sock"
    for service in services.values():
        assert "run:/run/kvtier" in service["volumes"]
    assert {services[name]["pid"] for name in ("one", "other")} == {"service:node"}
    for pod in pods:
        assert pod["hostPID"]
        mounts = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
        (volume,) = (each for each in pod["volumes"] if each["name"] == mounts["/run/kvtier"])
        assert volume["hostPath"]["path"] == "/run/kvtier"


def test_shared_memory_and_limits_have_room_for_the_memory_of_a_node() -> None:
    service, pod = load("compose/node.yaml")["services"]["node"], of_kind("DaemonSet")
    (container,) = pod["containers"]
    (shm,) = (each["emptyDir"] for each in pod["volumes"] if each["name"] == "shm")
    limits = {
        "compose": (service["shm_size"], service["mem_limit"]),
        "kubernetes": (
            shm["sizeLimit"] + "B",
            container["resources"]["limits"]["memory"] + "B",
        ),
    }
    for where, words in nodes():
        if where in limits:
            shared, memory = (parse_size(each, where) for each in limits[where])
            assert node_options(words).host_bytes < shared < memory


def test_what_vllm_is_given_is_what_its_plug_in_reads() -> None:
    words = container("kubernetes/vllm.yaml")["args"]
    given = json.loads(words[words.index("--kv-transfer-config") + 1])
    extra = given["kv_connector_extra_config"]
    options = [
        word
        for name in ("host_capacity", "disk_path", "disk_capacity")
        for word in (f"--{name.replace('_', '-')}", extra[name])
    ]
    printed = CliRunner().invoke(app, ["vllm-args", *options]).stdout
    assert json.loads(shlex.split(printed)[1]) == given
    settings = VllmSettings.read(extra)
    assert settings.host_capacity == "64GiB"
    assert settings.disk_bytes == 900 << 30


def test_keys_come_by_the_variable_that_is_read() -> None:
    assert KEY_VARIABLE in load("compose/compose.yaml")["services"]["server"]["environment"]
    assert KEY_VARIABLE in [each["name"] for each in container("kubernetes/server.yaml")["env"]]
    assert KEY_VARIABLE in environment()


@pytest.mark.engine
def test_probes_ask_what_needs_no_key() -> None:
    from kvtier.serve.server.gate import OPEN_PATHS

    for path in ("kubernetes/server.yaml", "kubernetes/vllm.yaml"):
        found = container(path)
        asked = {found[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")}
        assert asked <= OPEN_PATHS
        assert {each["containerPort"] for each in found["ports"]} == {8000}


def test_a_pod_and_a_unit_have_time_to_end() -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    (grace_s,) = (param.default for param in serve.params if param.name == "shutdown_grace_s")
    for document in documents("kubernetes/server.yaml"):
        if document["kind"] == "StatefulSet":
            spec = document["spec"]["template"]["spec"]
            assert spec["terminationGracePeriodSeconds"] > grace_s + 5
    assert int(service()["TimeoutStopSec"]) > grace_s + 5
    stop = load("compose/compose.yaml")["services"]["server"]["stop_grace_period"]
    assert int(stop.removesuffix("s")) > grace_s + 5


def test_disks_and_memory_have_room_for_what_is_reserved() -> None:
    for path in ("kubernetes/server.yaml", "kubernetes/vllm.yaml"):
        (found,) = (document for document in documents(path) if document["kind"] == "StatefulSet")
        (claim,) = found["spec"]["volumeClaimTemplates"]
        room = parse_size(claim["spec"]["resources"]["requests"]["storage"] + "B", "storage")
        text = json.dumps(container(path)["args"])
        disk, host = (
            parse_size(found[1], name)
            for name in ("disk", "host")
            if (found := re.search(rf"{name}[-_]capacity\W+([\w]+)", text))
        )
        assert disk < room
        limits = container(path)["resources"]["limits"]
        assert host < parse_size(limits["memory"] + "B", "memory")


def test_what_is_mounted_is_there() -> None:
    folder = DEPLOY / "compose"
    services = load("compose/compose.yaml")["services"].values()
    mounted = [each for service in services for each in service["volumes"] if each[0] == "."]
    assert len(mounted) == 4
    for each in mounted:
        assert (folder / each.split(":")[0]).exists(), each
    build = load("compose/compose.yaml")["services"]["server"]["build"]
    assert (folder / build["context"] / build["dockerfile"]).samefile(SERVER)


def test_prometheus_scrapes_what_is_there_and_has_a_key() -> None:
    services = load("compose/compose.yaml")["services"]
    (scrape,) = load("compose/prometheus.yml")["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["server:8000"]}]
    (secret,) = services["prometheus"]["secrets"]
    assert scrape["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    source = load("compose/compose.yaml")["secrets"][secret]["environment"]
    assert f"${{{source}:?" in services["server"]["environment"][KEY_VARIABLE]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no Prometheus: apt-get install it")
def test_prometheus_reads_its_settings(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "compose/prometheus.yml", tmp_path)
    shutil.copy(ROOT / "src/kvtier/tools/dashboard/kvtier-rules.yml", tmp_path)
    command = ["promtool", "check", "config", "--syntax-only", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_released_packages_link_to_the_repository_that_builds_them(tmp_path: Path) -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    url = "https://example.org/someone/kvtier"
    names = ["pyproject.toml", "scripts/tiny/pyproject.toml"]
    for job in ("sdist", "wheels"):
        (step,) = (
            step for step in release["jobs"][job]["steps"] if step.get("name") == "Project URLs"
        )
        for name in names:
            (tmp_path / job / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / job / name)
        subprocess.run(
            ["bash", "-ec", step["run"]], cwd=tmp_path / job, env={"URL": url}, check=True
        )
        for name in names:
            project = tomllib.loads((tmp_path / job / name).read_text())["project"]
            assert project["urls"] == {
                "Source": url,
                "Changelog": f"{url}/blob/HEAD/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }


def test_an_image_is_built_of_what_the_build_reads() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    copied = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    wanted = {"CMakeLists.txt", "pyproject.toml", "src", "native", "constraints.txt"}
    assert copied == wanted | {project["readme"], *project["license-files"]}
    extras = re.findall(r'"\.\[(.*?)\]"', SERVER.read_text())
    assert {each for found in extras for each in found.split(",")} <= {
        *project["optional-dependencies"]
    }


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_the_manifests_make_a_whole() -> None:
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    named = [each for each in made if each["kind"] != "Namespace"]
    assert {each["metadata"]["namespace"] for each in named} == {"kvtier"}
    for each in made:
        if each["kind"] == "StatefulSet":
            labels = each["spec"]["template"]["metadata"]["labels"]
            assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
@pytest.mark.parametrize("name", ["kvtier.service", "kvtier-node.service"])
def test_systemd_reads_the_unit(name: str, tmp_path: Path) -> None:
    unit = tmp_path / name
    text = (DEPLOY / "systemd" / name).read_text()
    unit.write_text(text.replace("/opt/kvtier/bin/kvtier", shutil.which("true") or "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert name not in done.stderr, done.stderr
