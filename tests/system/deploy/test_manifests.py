from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml

from ovmstrio.auth.key_file import write_key_file
from tests.support import ir
from tests.support.callers import bearer, entry_of
from tests.support.crd_schemas import FOLDER
from tests.support.kubernetes_rules import problems
from tests.support.ports import free_ports
from tests.support.processes import running, serving
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


def check(text: str) -> list[dict[str, Any]]:
    """Return the documents of a text that Kubernetes accepts together."""
    documents = read_documents(text)
    for each in documents:
        check_document(each)
    assert problems(documents) == []
    return documents


def kinds_of(documents: list[dict[str, Any]]) -> list[str]:
    return sorted(each["kind"] for each in documents)


_KSERVE = DEPLOY / "kserve" / "cluster-serving-runtime.yaml"


def _pod_spec() -> Any:
    (deployment,) = [each for each in read_documents(PLAIN.read_text()) if each["kind"] == "Deployment"]
    return deployment["spec"]["template"]["spec"]


def _options(container: Any) -> dict[str, str]:
    return dict(text.removeprefix("--").split("=") for text in container["args"] if "=" in text)


def test_plain_manifests_are_valid_and_pods_outlive_their_drain() -> None:
    documents = check(PLAIN.read_text())
    with pytest.raises(kubernetes_validate.ValidationError):
        check_document(documents[[each["kind"] for each in documents].index("Service")] | {"spce": {}})
    assert kinds_of(documents) == ["ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "ServiceAccount"]
    spec = _pod_spec()
    options = _options(spec["containers"][0])
    assert int(options["drain_delay"]) + int(options["drain_seconds"]) + 15 == spec["terminationGracePeriodSeconds"]
    assert spec["containers"][0]["readinessProbe"]["failureThreshold"] == 3


def test_kserve_runtimes_are_valid_and_drain_within_the_grace_period_of_kubernetes() -> None:
    runtimes = check(_KSERVE.read_text())
    assert [each["metadata"]["name"] for each in runtimes] == ["ovmstrio", "ovmstrio-config"]
    for runtime in runtimes:
        spec = {"containers": runtime["spec"]["containers"]}
        check_document({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
        (container,) = spec["containers"]
        options = _options(container)
        ports = {each["name"]: str(each["containerPort"]) for each in container["ports"]}
        assert ports == {"http1": options["rest_port"], "grpc": options["port"]}
        assert int(options["drain_delay"]) + int(options["drain_seconds"]) <= 30 - 10
        assert container["readinessProbe"]["failureThreshold"] == 3


def _change(document: Any, path: str, value: Any) -> None:
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    for part in parents:
        document = document[part]
    if value is None:
        del document[last]
    else:
        document[last] = value


_POD = "spec/template/spec"
_CONTAINER = f"{_POD}/containers/0"
_REFUSED: list[tuple[str, str, Any, str]] = [
    ("Deployment", f"{_POD}/volumes/1/hostPath", {"path": "/models"}, "volumes[models]: expected exactly one"),
    ("Deployment", f"{_POD}/volumes/2/name", "tmp", "volumes: duplicate 'tmp'"),
    ("Deployment", f"{_POD}/volumes/2/name", "Cache", "invalid 'Cache'"),
    ("Deployment", f"{_POD}/volumes/1/persistentVolumeClaim/claimName", "", "claimName: required"),
    ("Deployment", f"{_POD}/restartPolicy", "Never", "restartPolicy: expected one of ['Always']"),
    ("Deployment", f"{_POD}/tolerations", [{"operator": "Exists", "value": "x"}], "tolerations[0].value"),
    ("Deployment", f"{_POD}/tolerations", [{"value": "x"}], "expected Exists without a key"),
    ("Deployment", f"{_POD}/topologySpreadConstraints", [{"maxSkew": 0, "topologyKey": "zone",
     "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"a": "b"}}}], "maxSkew: expected 1 to"),
    ("Deployment", f"{_POD}/nodeSelector", {"a b": "c"}, "nodeSelector key: invalid 'a b'"),
    ("Deployment", f"{_CONTAINER}/ports/1/name", "grpc", "ports: duplicate 'grpc'"),
    ("Deployment", f"{_CONTAINER}/ports/1/name", "rest-of-all-calls", "invalid 'rest-of-all-calls'"),
    ("Deployment", f"{_CONTAINER}/ports/1/containerPort", 65536, "containerPort: expected 1 to 65535"),
    ("Deployment", f"{_CONTAINER}/readinessProbe/tcpSocket", {"port": 8000}, "readinessProbe: expected exactly one"),
    ("Deployment", f"{_CONTAINER}/startupProbe/httpGet", None, "startupProbe: expected exactly one"),
    ("Deployment", f"{_CONTAINER}/livenessProbe/successThreshold", 2, "successThreshold: expected one of [1]"),
    ("Deployment", f"{_CONTAINER}/livenessProbe/periodSeconds", -1, "periodSeconds: expected 1 to"),
    ("Deployment", f"{_CONTAINER}/resources/limits/cpu", "500m", "requests.cpu: expected at most the limit 0.500"),
    ("Deployment", f"{_CONTAINER}/resources/limits/memory", "2 Gi", "limits.memory: invalid '2 Gi'"),
    ("Deployment", f"{_CONTAINER}/volumeMounts/1/name", "weights", "volumeMounts[weights]: expected one of"),
    ("Deployment", f"{_CONTAINER}/volumeMounts/1/mountPath", "/tmp", "volumeMounts: duplicate '/tmp'"),
    ("Deployment", f"{_CONTAINER}/volumeMounts/0/subPath", "../config.json", "subPath: expected a relative path"),
    ("Deployment", f"{_CONTAINER}/env", [{"name": "1A", "value": "x"}], "env.name: invalid '1A'"),
    ("Deployment", f"{_CONTAINER}/env", [{"name": "A B", "value": "x"}], "env.name: invalid 'A B'"),
    ("Deployment", f"{_CONTAINER}/env", [{"name": "A", "value": "x", "valueFrom": {
     "fieldRef": {"fieldPath": "metadata.name"}}}], "expected value or valueFrom, got both"),
    ("Deployment", f"{_CONTAINER}/env", [{"name": "A", "valueFrom": {}}], "valueFrom: expected exactly one"),
    ("Deployment", f"{_CONTAINER}/image", "", "image: invalid ''"),
    ("Deployment", f"{_CONTAINER}/imagePullPolicy", "Sometimes", "imagePullPolicy: expected one of"),
    ("Deployment", f"{_CONTAINER}/name", "Server", "name: invalid 'Server'"),
    ("Deployment", f"{_CONTAINER}/securityContext/privileged", True, "cannot disallow privilege escalation"),
    ("Deployment", "spec/selector/matchLabels", {"app.kubernetes.io/name": "other"}, "does not select the labels"),
    ("Deployment", "spec/strategy/rollingUpdate/maxSurge", 0, "maxSurge and maxUnavailable are both 0"),
    ("Deployment", "spec/strategy/type", "Recreate", "rollingUpdate: only allowed for type RollingUpdate"),
    ("Deployment", "spec/replicas", -1, "replicas: expected 0 to"),
    ("Deployment", "spec/template/metadata/labels/team", "a b", "labels.team: invalid 'a b'"),
    ("Deployment", "spec/template/metadata/labels/team", 1, "labels.team: invalid 1"),
    ("Deployment", "metadata/name", "Ovmstrio", "metadata.name: invalid 'Ovmstrio'"),
    ("Service", "metadata/name", "1-ovmstrio", "metadata.name: invalid '1-ovmstrio'"),
    ("Service", "metadata/name", "my.ovmstrio", "metadata.name: invalid 'my.ovmstrio'"),
    ("Service", "spec/ports/1/port", 9000, "ports: duplicate (9000, 'TCP')"),
    ("Service", "spec/ports/1/port", 0, "port: expected 1 to 65535"),
    ("Service", "spec/ports/1/name", "grpc", "ports: duplicate 'grpc'"),
    ("Service", "spec/ports/1/name", None, "ports.name: invalid None"),
    ("Service", "spec/ports/1/appProtocol", "a/b/c", "appProtocol: invalid 'a/b/c'"),
    ("Service", "spec/type", "Headless", "type: expected one of"),
    ("ConfigMap", "data/a b", "{}", "data key: invalid 'a b'"),
    ("ConfigMap", "data/config.json", "x" * (1024 * 1024 + 1), "expected at most 1048576 bytes"),
    ("PodDisruptionBudget", "spec/minAvailable", 1, "spec: expected exactly one"),
]  # fmt: skip
_FAILING_LATER: list[tuple[str, str, Any, str]] = [
    ("Deployment", f"{_POD}/volumes/2", {"name": "cache"}, "volumes[cache]: expected exactly one"),
    ("Deployment", f"{_POD}/volumes/0/configMap/name", "other", "volume config: expected one of ['ovmstrio']"),
    ("Deployment", f"{_CONTAINER}/ports/1/containerPort", 9000, "ports: duplicate (9000, 'TCP')"),
    ("Deployment", f"{_CONTAINER}/ports/1/name", "http", "readinessProbe.port: expected one of ['grpc', 'http']"),
    ("Deployment", f"{_CONTAINER}/volumeMounts/1/mountPath", "/a:b", "mountPath: invalid '/a:b'"),
    ("Service", "spec/ports/1/targetPort", "web", "expected one of ['grpc', 'rest'], got 'web'"),
    ("Service", "spec/selector", {"app": "other"}, "selects no pods"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "path", "value", "text"), [*_REFUSED, *_FAILING_LATER])
def test_rules_find_what_an_api_server_refuses_or_a_cluster_cannot_run(
    kind: str, path: str, value: Any, text: str
) -> None:
    documents = deepcopy(read_documents(PLAIN.read_text()))
    (document,) = [each for each in documents if each["kind"] == kind]
    _change(document, path, value)
    assert text in "\n".join(problems(documents))


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
    "keysSecret=keys", "serviceMonitor.keySecret.name=scraper", "options[0]=--log_format=json",
    "options[1]=--cache-dir=/cache",
    "env[0].name=LOG", "env[0].value=off",
    "podAnnotations.one=two", "podLabels.team=vision", "nodeSelector.kind=cpu", "imagePullSecrets[0].name=registry",
    "tolerations[0].operator=Exists", "topologySpreadConstraints[0].maxSkew=1",
    "topologySpreadConstraints[0].topologyKey=zone", "topologySpreadConstraints[0].whenUnsatisfiable=ScheduleAnyway",
    "service.annotations.a=b",
]  # fmt: skip


def _render(*settings: str, values: Path = DEPLOY / "kubernetes" / "values.yaml", release: str = "ovmstrio") -> str:
    assert _HELM is not None
    given = [text for each in settings for text in ("--set", each)]
    command = [_HELM, "template", release, str(DEPLOY / "helm" / "ovmstrio"), "-f", str(values), *given]
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
        (["autoscaling.by=hpa", "autoscaling.minReplicas=0", "autoscaling.maxReplicas=1"], {"HorizontalPodAutoscaler"}),
        (["models=null", "config.handler_config_list[0].name=h"], set()),
        (["models.persistentVolumeClaim=null", "models.hostPath.path=/models"], set()),
        (["resources.limits.memory=512Mi", "resources.limits.cpu=500m"], set()),
        (["configUpdate=reload", "podAnnotations=null", "podLabels=null"], set()),
        (["podLabels.app\\.kubernetes\\.io/name=mine", "podAnnotations.checksum/config=mine"], set()),
        (["drain.delaySeconds=0", "drain.seconds=600", "startSeconds=11"], set()),
        (["service.type=LoadBalancer", "service.grpcPort=443", "service.restPort=80"], set()),
        (["serviceMonitor.enabled=true", "serviceMonitor.labels=null"], {"ServiceMonitor"}),
    ],
)
def test_the_rendered_chart_is_valid(settings: list[str], kinds: set[str]) -> None:
    documents = check(_render(*settings))
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
        (["options[0]=--rest_port=8080"], "options"),
        (["options[0]=--rest-port=8080"], "options"),
        (["optinos[0]=--log-level=DEBUG"], "optinos"),
        (["models.hostPath.path=/models"], "models"),
        (["configUpdate=both"], "configUpdate"),
        (["service.restPort=9000"], "service.restPort"),
        (["service.restPort=70000"], "restPort"),
        (["service.type=Headless"], "type"),
        (["autoscaling.by=hpa", "autoscaling.minReplicas=5"], "autoscaling.maxReplicas"),
        (["autoscaling.by=keda", "autoscaling.minReplicas=5"], "autoscaling.maxReplicas"),
        (["env[0].name=A B", "env[0].value=x"], "env"),
        (["env[0].name=A", "env[0].value=x", "env[0].valueFrom.fieldRef.fieldPath=metadata.name"], "env"),
        (["podLabels.team=1"], "podLabels"),
        (["serviceMonitor.enabled=true", "keysSecret=keys"], "serviceMonitor.keySecret.name"),
        (["serviceMonitor.enabled=true", "options[0]=--oidc_issuer=https://issuer"], "serviceMonitor.keySecret.name"),
        (["serviceMonitor.enabled=true", "options[0]=--oidc-issuer=https://issuer"], "serviceMonitor.keySecret.name"),
    ],
)
def test_wrong_values_are_refused_with_their_name(settings: list[str], name: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        _render(*settings)
    assert name in caught.value.stderr


@needs_helm
@pytest.mark.parametrize("release", ["ovms", "ovmstrio", "2-models", "team.models", "1.2", "a" * 53, "0" * 53])
def test_objects_have_valid_names_for_every_name_of_a_release(release: str) -> None:
    check(_render("autoscaling.by=hpa", "serviceMonitor.enabled=true", "networkPolicy.enabled=true", release=release))


@needs_helm
def test_a_changed_configuration_either_replaces_pods_or_reaches_running_pods() -> None:
    def template(update: str, path: str) -> Any:
        text = _render(f"configUpdate={update}", f"config.model_config_list[0].config.base_path={path}")
        (deployment,) = [each for each in read_documents(text) if each["kind"] == "Deployment"]
        return deployment["spec"]["template"]

    def mount_of(pod: Any) -> Any:
        return pod["spec"]["containers"][0]["volumeMounts"][0]

    assert template("restart", "/models/a") != template("restart", "/models/b")
    # The kubelet does not update files that are mounted by their path.
    assert mount_of(template("restart", "/models/a"))["subPath"] == "config.json"
    assert template("reload", "/models/a") == template("reload", "/models/b")
    assert "subPath" not in mount_of(template("reload", "/models/a"))


def _write_volume(folder: Path, number: int, config: dict[str, Any]) -> None:
    """Write a version of a ConfigMap into a folder as the kubelet does: by exchanging a link to a folder."""
    version = folder / f"..{number}"
    version.mkdir(parents=True)
    (version / "config.json").write_text(json.dumps(config))
    (folder / "..new").symlink_to(version.name)
    (folder / "..new").replace(folder / "..data")
    if not (folder / "config.json").is_symlink():
        (folder / "config.json").symlink_to("..data/config.json")


@pytest.mark.slow
def test_a_running_server_applies_a_changed_config_map(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "iris")

    def config(*names: str) -> dict[str, Any]:
        entries = [{"config": {"name": name, "base_path": str(tmp_path / "iris")}} for name in names]
        return {"model_config_list": entries}

    volume = tmp_path / "volume"
    _write_volume(volume, 1, config("first"))
    with serving("--config_path", str(volume / "config.json")) as server:
        assert server.get("/v2/models/first/ready").status_code == 200
        _write_volume(volume, 2, config("first", "second"))
        until(lambda: server.get("/v2/models/second/ready").status_code == 200)
        assert server.get("/v2/models/first/ready").status_code == 200


_PAGES = sorted((DEPLOY.parent / "docs").glob("*.md"))
_EXAMPLES = [(page.name, text) for page in _PAGES for text in re.findall(r"(?ms)^```yaml\n(.*?)^```", page.read_text())]
_VALUES = [text for _, text in _EXAMPLES if text.startswith("# values.yaml")]
_OBJECTS = [text for _, text in _EXAMPLES if re.search("(?m)^apiVersion:", text)]


@needs_helm
@pytest.mark.parametrize("text", _VALUES)
def test_values_of_the_documentation_render_to_valid_objects(text: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(text)
    assert "Deployment" in kinds_of(check(_render(values=values)))


@pytest.mark.parametrize("text", _OBJECTS)
def test_inference_services_of_the_documentation_fit_their_runtime(text: str) -> None:
    runtimes = {each["metadata"]["name"]: each["spec"] for each in read_documents(_KSERVE.read_text())}
    for service in read_documents(text):
        assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
        assert problems([service]) == []
        model = service["spec"]["predictor"]["model"]
        runtime = runtimes[model["runtime"]]
        formats = {each["name"] for each in runtime["supportedModelFormats"]}
        assert model["modelFormat"]["name"] in formats
        # KServe appends the arguments of the service to those of the runtime.
        options = _options({"args": [*runtime["containers"][0]["args"], *model.get("args", [])]})
        grace = service["spec"]["predictor"].get("terminationGracePeriodSeconds", 30)
        assert int(options["drain_delay"]) + int(options["drain_seconds"]) + 10 <= grace


def test_the_documentation_has_examples_of_values_and_objects() -> None:
    assert len(_VALUES) >= 2
    assert _OBJECTS


_NEEDS_PROMETHEUS = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")


def _scrape(endpoint: Any, key: str, target: str, labels: dict[str, str]) -> dict[str, Any]:
    """Return the scrape that the operator of Prometheus makes of a ServiceMonitor's endpoint, every second."""
    authorization = endpoint["authorization"]
    assert authorization["credentials"] == {"name": "scraper", "key": "token"}
    return {
        "job_name": "servers",
        "metrics_path": endpoint["path"],
        "scrape_interval": "1s",
        "authorization": {"type": authorization["type"], "credentials": key},
        "static_configs": [{"targets": [target], "labels": labels}],
    }


@needs_helm
@_NEEDS_PROMETHEUS
@pytest.mark.slow
def test_autoscalers_see_the_requests_of_pods_that_authenticate_callers(tmp_path: Path) -> None:
    monitor = ("keysSecret=keys", "serviceMonitor.enabled=true", "serviceMonitor.keySecret.name=scraper")
    rendered = {each["kind"]: each for each in check(_render("autoscaling.by=keda", *monitor))}
    (endpoint,) = rendered["ServiceMonitor"]["spec"]["endpoints"]
    (trigger,) = rendered["ScaledObject"]["spec"]["triggers"]
    (rule,) = next(yaml.safe_load(text)["rules"] for _, text in _EXAMPLES if text.startswith("# prometheus-adapter"))
    labels = {"namespace": "default", "service": rendered["Service"]["metadata"]["name"], "pod": "a"}
    ir.save(ir.dummy(), tmp_path, "iris")
    keys = tmp_path / "keys.json"
    write_key_file(keys, [entry_of("shop", "infer:*"), entry_of("prometheus", "metrics")])
    (port,) = free_ports(1)
    model = ("--model_name", "iris", "--model_path", str(tmp_path / "iris"))
    with ExitStack() as stack:
        server = stack.enter_context(serving(*model, "--keys_file", str(keys), "--metrics_enable"))
        config = tmp_path / "prometheus.yml"
        scrape = _scrape(endpoint, "prometheus", server.rest.removeprefix("http://"), labels)
        config.write_text(json.dumps({"scrape_configs": [scrape]}))
        data = f"--storage.tsdb.path={tmp_path / 'data'}"
        command = ["prometheus", f"--config.file={config}", data, f"--web.listen-address=127.0.0.1:{port}"]
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        stack.callback(process.kill)

        def value_after_a_request(query: str) -> float:
            assert process.poll() is None, "Prometheus has ended"
            body = {"inputs": [{"name": "b", "datatype": "FP32", "shape": [1, 10], "data": [1] * 10}]}
            url = f"{server.rest}/v2/models/iris/infer"
            assert httpx.post(url, json=body, headers=bearer("shop"), timeout=WAIT_SECONDS).is_success
            try:
                address = f"http://127.0.0.1:{port}/api/v1/query"
                answer = httpx.get(address, params={"query": query}, timeout=WAIT_SECONDS)
            except httpx.TransportError:
                return 0
            found = answer.json()["data"]["result"] if answer.is_success else []
            return sum(float(each["value"][1]) for each in found)

        until(lambda: value_after_a_request(trigger["metadata"]["query"]) > 0)
        series, _, selector = rule["seriesQuery"].partition("{")
        matchers = f'namespace="default",{selector.rstrip("}")}'
        query = rule["metricsQuery"].replace("<<.Series>>", series).replace("<<.LabelMatchers>>", matchers)
        until(lambda: value_after_a_request(query.replace("<<.GroupBy>>", "pod")) > 0)
    (scaler,) = [each for each in check(_render("autoscaling.by=hpa")) if each["kind"] == "HorizontalPodAutoscaler"]
    assert scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]
