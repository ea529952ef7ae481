"""What Kubernetes would take: documents of the chart, plain ones and KServe's, held to the schemas of the API."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.support.crd_schemas import FOLDER

_DEPLOY = Path(__file__).parents[3] / "deploy"
_CHART = _DEPLOY / "helm" / "ovmstrio"
_PLAIN = _DEPLOY / "kubernetes" / "manifests.yaml"
_VALUES = _DEPLOY / "kubernetes" / "values.yaml"
_KSERVE = _DEPLOY / "kserve" / "cluster-serving-runtime.yaml"
_HELM = os.environ.get("HELM") or shutil.which("helm")
_OLDEST, _NEWEST = "1.28", "1.35"

_with_helm = pytest.mark.skipif(_HELM is None, reason="there is no helm on this machine")

_EVERYTHING = [
    "autoscaling.by=hpa", "networkPolicy.enabled=true", "networkPolicy.from[0].podSelector.matchLabels.app=web",
    "serviceMonitor.enabled=true", "serviceMonitor.labels.release=monitoring", "tlsSecret=certificate",
    "keysSecret=keys", "options[0]=--log_format=json", "env[0].name=LOG", "env[0].value=off",
    "podAnnotations.one=two", "podLabels.team=vision", "nodeSelector.kind=cpu", "imagePullSecrets[0].name=registry",
    "tolerations[0].operator=Exists", "topologySpreadConstraints[0].maxSkew=1",
    "topologySpreadConstraints[0].topologyKey=zone", "topologySpreadConstraints[0].whenUnsatisfiable=ScheduleAnyway",
    "service.annotations.a=b",
]  # fmt: skip


def _documents(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]


def _render(*settings: str) -> str:
    assert _HELM is not None
    given = [text for each in settings for text in ("--set", each)]
    command = [_HELM, "template", "ovmstrio", str(_CHART), "-f", str(_VALUES), *given]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def _check(document: dict[str, Any]) -> None:
    """Hold a document to its schema, in which nothing is allowed that has no name there."""
    group, _, version = document["apiVersion"].rpartition("/")
    custom = FOLDER / f"{document['kind']}.{group}.{version}.json"
    if custom.exists():
        jsonschema.validate(document, json.loads(custom.read_text()))
        return
    for release in (_OLDEST, _NEWEST):
        kubernetes_validate.validate(document, release, strict=True)


def _kinds(documents: list[dict[str, Any]]) -> list[str]:
    return sorted(each["kind"] for each in documents)


def test_plain_manifests_are_what_the_api_takes() -> None:
    """In the oldest and the newest release that the chart is for."""
    documents = _documents(_PLAIN.read_text())
    for each in documents:
        _check(each)
    assert _kinds(documents) == ["ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "ServiceAccount"]


def test_a_wrong_name_would_be_seen() -> None:
    """The schemas are strict: a member that nobody knows is refused."""
    (deployment,) = [each for each in _documents(_PLAIN.read_text()) if each["kind"] == "Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        _check(deployment)


@_with_helm
def test_plain_manifests_are_those_of_the_chart() -> None:
    """Rendered with the values beside them."""
    assert _documents(_render()) == _documents(_PLAIN.read_text())


@_with_helm
@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ([], set()),
        (_EVERYTHING, {"HorizontalPodAutoscaler", "NetworkPolicy", "ServiceMonitor"}),
        (["autoscaling.by=keda", "autoscaling.minReplicas=0"], {"ScaledObject"}),
    ],
    ids=["usual", "everything", "keda"],
)
def test_what_the_chart_renders_is_what_the_api_takes(settings: list[str], kinds: set[str]) -> None:
    """Whatever is switched on; and where something else scales, the Deployment says no number of pods."""
    documents = _documents(_render(*settings))
    for each in documents:
        _check(each)
    assert kinds <= {each["kind"] for each in documents}
    (deployment,) = [each for each in documents if each["kind"] == "Deployment"]
    assert ("replicas" in deployment["spec"]) == (not {"HorizontalPodAutoscaler", "ScaledObject"} & kinds)


@_with_helm
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["config=null"], "config"),
        (["config.model_config_list=null"], "config"),
        (["autoscaling.by=magic"], "autoscaling"),
        (["options[0]=log_level DEBUG"], "options"),
    ],
)
def test_wrong_values_are_told_before_anything_is_installed(settings: list[str], told: str) -> None:
    """With the name of what is wrong."""
    with pytest.raises(subprocess.CalledProcessError) as caught:
        _render(*settings)
    assert told in caught.value.stderr


def test_the_grace_of_pods_is_longer_than_their_drain() -> None:
    """Or Kubernetes would kill them amid calls."""
    (deployment,) = [each for each in _documents(_PLAIN.read_text()) if each["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    options = dict(text.removeprefix("--").split("=") for text in spec["containers"][0]["args"] if "=" in text)
    drain = int(options["drain_delay"]) + int(options["drain_seconds"])
    assert drain < spec["terminationGracePeriodSeconds"]


def test_runtimes_for_kserve_are_what_its_definitions_take() -> None:
    """The runtimes by KServe's own schema, their containers as those of a pod."""
    runtimes = _documents(_KSERVE.read_text())
    for runtime in runtimes:
        _check(runtime)
        spec = {"containers": runtime["spec"]["containers"]}
        _check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    assert [each["metadata"]["name"] for each in runtimes] == ["ovmstrio", "ovmstrio-config"]
