"""The Helm chart, rendered by Helm's own library, makes what the Kubernetes manifests have."""

from __future__ import annotations

from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]

from kvtier.tools.cli import app

from .test_files import DEPLOY, documents

CHART = DEPLOY / "helm/kvtier"


def rendered(name: str = "kvtier", **values: object) -> dict[str, Any]:
    """Objects of the chart, by kind."""
    helm = pytest.importorskip("helm_python", reason="no Helm: make check-deploy brings it")
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name=name, namespace="kvtier").values()
    found = [each for text in texts for each in yaml.safe_load_all(text) if each]
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def test_helm_has_no_complaint() -> None:
    helm = pytest.importorskip("helm_python", reason="no Helm: make check-deploy brings it")
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    assert [each["error"] for each in found["messages"]] == ["icon is recommended"]


def test_without_changes_it_is_what_the_manifests_have() -> None:
    made = rendered(serviceMonitor={"enabled": True})
    written = [*documents("kubernetes/server.yaml"), *documents("kubernetes/monitor.yaml")]
    assert made == {each["kind"]: each for each in written} | {
        "NetworkPolicy": made["NetworkPolicy"]
    }
    (network,) = documents("kubernetes/network.yaml")
    # The manifest's holds for all pods of the namespace, the chart's for its own.
    network["metadata"]["name"] = "kvtier"
    network["spec"]["podSelector"] = {"matchLabels": made["Service"]["spec"]["selector"]}
    assert made["NetworkPolicy"] == network


def test_what_is_not_wanted_is_left_out() -> None:
    assert set(rendered()) == {
        "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"
    }  # fmt: skip
    assert "NetworkPolicy" not in rendered(networkPolicy={"enabled": False})


def test_two_releases_share_no_pod() -> None:
    one, other = (rendered(name, serviceMonitor={"enabled": True}) for name in ("one", "other"))
    for kind in one:
        assert one[kind]["metadata"]["name"] == "one"
        assert one[kind] != other[kind]
    labels = other["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"):
        spec = one[kind]["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        assert not (selector.get("matchLabels") or selector).items() <= labels.items()


def test_every_value_has_its_place() -> None:
    """And what it makes is a command that kvtier knows."""
    volume = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
    mount = {"name": "models", "mountPath": "/models"}
    made = rendered(
        replicas=5,
        image={"repository": "mirror/kvtier", "tag": "1.2"},
        model="/models/my model",
        deviceCapacity="2GiB",
        hostCapacity="8GiB",
        diskCapacity="400GiB",
        extraArgs=["--eviction-policy=lru", "--ssl-keyfile=a: b"],
        keysSecret="mine",
        resources={"limits": {"memory": "32Gi"}},
        storage={"size": "500Gi", "className": "local-nvme"},
        extraVolumes=[volume],
        extraVolumeMounts=[mount],
        nodeSelector={"disk": "nvme"},
        tolerations=[{"operator": "Exists"}],
        networkPolicy={"namespaces": ["edge"]},
        serviceMonitor={"enabled": True, "labels": {"release": "prometheus"}, "interval": "1m"},
    )
    spec = made["StatefulSet"]["spec"]
    pod = spec["template"]["spec"]
    (server,) = pod["containers"]
    assert (spec["replicas"], server["image"]) == (5, "mirror/kvtier:1.2")
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"disk": "nvme"}, [{"operator": "Exists"}])
    assert volume in pod["volumes"]
    assert mount in server["volumeMounts"]
    assert server["resources"] == {
        "limits": {"memory": "32Gi"}, "requests": {"cpu": "4", "memory": "12Gi"}
    }  # fmt: skip
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "local-nvme"
    assert claim["spec"]["resources"]["requests"]["storage"] == "500Gi"
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = serve.make_context("serve", server["args"][1:]).params
    assert options["model"] == "/models/my model"
    assert options["ssl_keyfile"] == "a: b"
    names = ("device_capacity", "host_capacity", "disk_capacity", "eviction_policy")
    assert [options[name] for name in names] == ["2GiB", "8GiB", "400GiB", "lru"]
    (variable,) = server["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "keys"}
    monitor = made["ServiceMonitor"]
    assert monitor["metadata"]["labels"] == {"release": "prometheus"}
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["interval"] == "1m"
    assert endpoint["authorization"]["credentials"] == {"name": "mine", "key": "metrics"}
    (source,) = made["NetworkPolicy"]["spec"]["ingress"][0]["from"]
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "edge"}


def test_the_monitor_is_what_the_operator_knows() -> None:
    """A field that its schema does not have is lost on the way through its model."""
    models = pytest.importorskip(
        "cloudcoil.models.prometheus_operator.v1", reason="no schema: make check-deploy brings it"
    )
    (written,) = documents("kubernetes/monitor.yaml")
    read = models.ServiceMonitor.model_validate(written)
    assert read.model_dump(mode="json", by_alias=True, exclude_none=True) == written


def test_the_monitor_asks_a_port_and_a_path_that_are_there() -> None:
    (monitor,) = documents("kubernetes/monitor.yaml")
    (service,) = (
        document
        for document in documents("kubernetes/server.yaml")
        if document["kind"] == "Service"
    )
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {each["name"] for each in service["spec"]["ports"]}
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    assert endpoint["path"] == "/metrics"
