from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml

from tests.support import ir
from tests.support.crd_schemas import FOLDER
from tests.support.ports import free_ports
from tests.support.processes import running
from tests.support.waits import WAIT_SECONDS, until

kubernetes_validate: Any = pytest.importorskip("kubernetes_validate")


DEPLOY = Path(__file__).parents[3] / "deploy"
PLAIN = DEPLOY / "kubernetes" / "manifests.yaml"
_OLDEST, _NEWEST = "1.28", "1.35"


def read_documents(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]


def check_document(document: dict[str, Any]) -> None:
    """Check a document against its schema, which refuses unknown members, for the oldest and the newest release."""
    group, _, version = document["apiVersion"].rpartition("/")
    custom = FOLDER / f"{document['kind']}.{group}.{version}.json"
    if custom.exists():
        jsonschema.validate(document, json.loads(custom.read_text()))
        return
    for release in (_OLDEST, _NEWEST):
        kubernetes_validate.validate(document, release, strict=True)


def kinds_of(documents: list[dict[str, Any]]) -> list[str]:
    return sorted(each["kind"] for each in documents)


_KSERVE = DEPLOY / "kserve" / "cluster-serving-runtime.yaml"


def _pod_spec() -> Any:
    (deployment,) = [each for each in read_documents(PLAIN.read_text()) if each["kind"] == "Deployment"]
    return deployment["spec"]["template"]["spec"]


def test_plain_manifests_match_the_schemas_and_pods_outlive_their_drain() -> None:
    documents = read_documents(PLAIN.read_text())
    for each in documents:
        check_document(each)
    with pytest.raises(kubernetes_validate.ValidationError):
        check_document(documents[[each["kind"] for each in documents].index("Service")] | {"spce": {}})
    assert kinds_of(documents) == ["ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "ServiceAccount"]
    spec = _pod_spec()
    options = dict(text.removeprefix("--").split("=") for text in spec["containers"][0]["args"] if "=" in text)
    drain = int(options["drain_delay"]) + int(options["drain_seconds"])
    assert drain < spec["terminationGracePeriodSeconds"]


def test_kserve_runtimes_match_their_schema() -> None:
    runtimes = read_documents(_KSERVE.read_text())
    for runtime in runtimes:
        check_document(runtime)
        spec = {"containers": runtime["spec"]["containers"]}
        check_document({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    assert [each["metadata"]["name"] for each in runtimes] == ["ovmstrio", "ovmstrio-config"]


@pytest.mark.slow
def test_probes_of_a_pod_pass_in_order_and_calls_are_answered_while_it_drains(tmp_path: Path) -> None:
    (container,) = _pod_spec()["containers"]
    ir.save(ir.dummy(), tmp_path, "iris")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": {"name": "iris", "base_path": "iris"}}]}))
    grpc, rest = free_ports(2)
    changed = {
        "--config_path": config, "--port": grpc, "--rest_port": rest, "--drain_delay": 4, "--drain_seconds": 10
    }  # fmt: skip
    split = [text.partition("=") for text in container["args"]]
    arguments = [f"{name}{separator}{changed.get(name, value)}" for name, separator, value in split]
    bound = ["--grpc_bind_address=127.0.0.1", "--rest_bind_address=127.0.0.1", "--crash_probe=off"]
    with running(*arguments, *bound, grpc=grpc, rest=rest, ready=False) as server:

        def passes(probe: str) -> bool:
            assert server.process.poll() is None
            return server.answers(container[probe]["httpGet"]["path"])

        until(lambda: passes("startupProbe"))
        assert passes("livenessProbe")
        until(lambda: passes("readinessProbe"))
        server.process.terminate()
        until(lambda: not passes("readinessProbe"))
        assert passes("livenessProbe")
        body = {"inputs": [{"name": "b", "datatype": "FP32", "shape": [1, 10], "data": [1] * 10}]}
        answer = httpx.post(f"{server.rest}/v2/models/iris/infer", json=body, timeout=WAIT_SECONDS)
        assert answer.json()["outputs"][0]["data"] == [2.0] * 10
        assert server.process.wait(14 + WAIT_SECONDS) == 0


_HELM = os.environ.get("HELM") or shutil.which("helm")

needs_helm = pytest.mark.skipif(_HELM is None, reason="there is no helm on this machine")

_EVERYTHING = [
    "autoscaling.by=hpa", "networkPolicy.enabled=true", "networkPolicy.from[0].podSelector.matchLabels.app=web",
    "serviceMonitor.enabled=true", "serviceMonitor.labels.release=monitoring", "tlsSecret=certificate",
    "keysSecret=keys", "options[0]=--log_format=json", "env[0].name=LOG", "env[0].value=off",
    "podAnnotations.one=two", "podLabels.team=vision", "nodeSelector.kind=cpu", "imagePullSecrets[0].name=registry",
    "tolerations[0].operator=Exists", "topologySpreadConstraints[0].maxSkew=1",
    "topologySpreadConstraints[0].topologyKey=zone", "topologySpreadConstraints[0].whenUnsatisfiable=ScheduleAnyway",
    "service.annotations.a=b",
]  # fmt: skip


def _render(*settings: str) -> str:
    assert _HELM is not None
    given = [text for each in settings for text in ("--set", each)]
    values = DEPLOY / "kubernetes" / "values.yaml"
    command = [_HELM, "template", "ovmstrio", str(DEPLOY / "helm" / "ovmstrio"), "-f", str(values), *given]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@needs_helm
def test_plain_manifests_equal_the_rendered_chart() -> None:
    assert read_documents(_render()) == read_documents(PLAIN.read_text())


@needs_helm
@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ([], set()),
        (_EVERYTHING, {"HorizontalPodAutoscaler", "NetworkPolicy", "ServiceMonitor"}),
        (["autoscaling.by=keda", "autoscaling.minReplicas=0"], {"ScaledObject"}),
    ],
    ids=["usual", "everything", "keda"],
)
def test_the_rendered_chart_matches_the_schemas_of_the_api(settings: list[str], kinds: set[str]) -> None:
    documents = read_documents(_render(*settings))
    for each in documents:
        check_document(each)
    assert kinds <= {each["kind"] for each in documents}
    (deployment,) = [each for each in documents if each["kind"] == "Deployment"]
    assert ("replicas" in deployment["spec"]) == (not {"HorizontalPodAutoscaler", "ScaledObject"} & kinds)


@needs_helm
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (["config=null"], "config"),
        (["config.model_config_list=null"], "config"),
        (["autoscaling.by=magic"], "autoscaling"),
        (["options[0]=log_level DEBUG"], "options"),
    ],
)
def test_wrong_values_are_refused_with_their_name(settings: list[str], name: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        _render(*settings)
    assert name in caught.value.stderr
