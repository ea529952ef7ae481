"""Rules of the Kubernetes API server that its schemas do not state, for the fields that the deployment files use.

The API server validates an object in code after its schema (``k8s.io/kubernetes/pkg/apis/*/validation``). `problems`
repeats these rules. It adds faults that only show in a running cluster: names of objects and ports that do not exist,
a port that two names of a container share, and a volume without a source.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Any, Final

Object = dict[str, Any]

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN: Final = re.compile(rf"(?=.{{1,253}}$){_LABEL.pattern}(\.{_LABEL.pattern})*")
_SERVICE_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_QUALIFIED: Final = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_PORT_NAME: Final = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
_VARIABLE: Final = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_DATA_KEY: Final = re.compile(r"(?!\.\.)(?!\.$)[-._a-zA-Z0-9]{1,253}")
_QUANTITY: Final = re.compile(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+|m|[kMGTPE]|[KMGTPE]i)?")
_SCALES: Final = {unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)} | {
    f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)
}
_PROBES: Final = ("startupProbe", "livenessProbe", "readinessProbe")
_HANDLERS: Final = frozenset({"exec", "httpGet", "tcpSocket", "grpc"})
_MOST_CONFIG_BYTES: Final = 1024 * 1024


def problems(objects: Iterable[Object]) -> list[str]:
    """Return what an API server refuses of objects in one namespace, each with the path of its field."""
    objects = list(objects)
    found = []
    for each in objects:
        kind = each["kind"]
        found += [f"{kind} {text}" for text in (*_metadata(each), *_RULES.get(kind, _none)(each))]
    return found + list(_references(objects))


def _none(_: Object) -> Iterator[str]:
    yield from ()


def _matches(rule: re.Pattern[str], value: object, path: str) -> Iterator[str]:
    if not (isinstance(value, str) and rule.fullmatch(value)):
        yield f"{path}: invalid {value!r}"


def _unique(values: Iterable[object], path: str) -> Iterator[str]:
    for value, count in Counter(values).items():
        if count > 1:
            yield f"{path}: duplicate {value!r}"


def _exactly_one(given: Iterable[str], path: str, known: Iterable[str] | None = None) -> Iterator[str]:
    chosen = sorted(set(given) & set(known) if known is not None else given)
    if len(chosen) != 1:
        yield f"{path}: expected exactly one of its alternatives, got {chosen}"


def _one_of(value: object, allowed: Iterable[object], path: str) -> Iterator[str]:
    if value not in (allowed := sorted(allowed, key=str)):
        yield f"{path}: expected one of {allowed}, got {value!r}"


def _within(value: object, least: int, most: float, path: str) -> Iterator[str]:
    if not (isinstance(value, int) and least <= value <= most):
        yield f"{path}: expected {least} to {most}, got {value!r}"


def _labels(labels: Object, path: str) -> Iterator[str]:
    for key, value in labels.items():
        yield from _matches(_QUALIFIED, key, f"{path} key")
        yield from _matches(_LABEL_VALUE, value, f"{path}.{key}")


def _metadata(document: Object) -> Iterator[str]:
    metadata = document["metadata"]
    rule = _SERVICE_NAME if document["kind"] == "Service" else _SUBDOMAIN
    yield from _matches(rule, metadata.get("name"), "metadata.name")
    yield from _labels(metadata.get("labels", {}), "metadata.labels")
    for key, value in metadata.get("annotations", {}).items():
        yield from _matches(_QUALIFIED, key.lower(), "metadata.annotations key")
        yield from _one_of(type(value), [str], f"metadata.annotations.{key}")


# Pods


def _pod(spec: Object, path: str) -> Iterator[str]:
    volumes = spec.get("volumes", [])
    yield from _unique((each["name"] for each in volumes), f"{path}.volumes")
    for volume in volumes:
        at = f"{path}.volumes[{volume['name']}]"
        yield from _matches(_LABEL, volume["name"], at)
        yield from _exactly_one(volume.keys() - {"name"}, at)
        for source, key in (("persistentVolumeClaim", "claimName"), ("secret", "secretName"), ("configMap", "name")):
            if source in volume and not volume[source].get(key):
                yield f"{at}.{source}.{key}: required"
    containers = spec.get("containers", [])
    if not containers:
        yield f"{path}.containers: required"
    yield from _unique((each["name"] for each in containers), f"{path}.containers")
    names = {each["name"] for each in volumes}
    for container in containers:
        yield from _container(container, f"{path}.containers[{container['name']}]", names)
    yield from _labels(spec.get("nodeSelector", {}), f"{path}.nodeSelector")
    for number, each in enumerate(spec.get("tolerations", [])):
        yield from _toleration(each, f"{path}.tolerations[{number}]")
    spread = spec.get("topologySpreadConstraints", [])
    yield from _unique(
        ((each.get("topologyKey"), each.get("whenUnsatisfiable")) for each in spread),
        f"{path}.topologySpreadConstraints",
    )
    for number, each in enumerate(spread):
        at = f"{path}.topologySpreadConstraints[{number}]"
        yield from _within(each.get("maxSkew"), 1, float("inf"), f"{at}.maxSkew")
        yield from _matches(_QUALIFIED, each.get("topologyKey"), f"{at}.topologyKey")
        yield from _one_of(
            each.get("whenUnsatisfiable"), ["DoNotSchedule", "ScheduleAnyway"], f"{at}.whenUnsatisfiable"
        )


def _container(container: Object, path: str, volumes: set[str]) -> Iterator[str]:
    yield from _matches(_LABEL, container["name"], f"{path}.name")
    if not container.get("image", "").strip() or container["image"] != container["image"].strip():
        yield f"{path}.image: invalid {container.get('image')!r}"
    yield from _one_of(
        container.get("imagePullPolicy", "Always"), ["Always", "IfNotPresent", "Never"], f"{path}.imagePullPolicy"
    )
    ports = container.get("ports", [])
    yield from _unique((each["name"] for each in ports if "name" in each), f"{path}.ports")
    yield from _unique(((each["containerPort"], each.get("protocol", "TCP")) for each in ports), f"{path}.ports")
    for port in ports:
        yield from _within(port["containerPort"], 1, 65535, f"{path}.ports.containerPort")
        yield from _one_of(port.get("protocol", "TCP"), ["TCP", "UDP", "SCTP"], f"{path}.ports.protocol")
        if "name" in port:
            yield from _matches(_PORT_NAME, port["name"], f"{path}.ports.name")
    for name in _PROBES:
        if name in container:
            yield from _probe(container[name], name, {each.get("name") for each in ports}, f"{path}.{name}")
    yield from _environment(container.get("env", []), f"{path}.env")
    yield from _resources(container.get("resources", {}), f"{path}.resources")
    mounts = container.get("volumeMounts", [])
    yield from _unique((each["mountPath"] for each in mounts), f"{path}.volumeMounts")
    for mount in mounts:
        at = f"{path}.volumeMounts[{mount['name']}]"
        yield from _one_of(mount["name"], sorted(volumes), at)
        if not mount["mountPath"] or ":" in mount["mountPath"]:
            yield f"{at}.mountPath: invalid {mount['mountPath']!r}"
        if mount.get("subPath", "").startswith("/") or ".." in mount.get("subPath", "").split("/"):
            yield f"{at}.subPath: expected a relative path without .., got {mount['subPath']!r}"
    security = container.get("securityContext", {})
    added = security.get("capabilities", {}).get("add", [])
    if security.get("allowPrivilegeEscalation") is False and (security.get("privileged") or "CAP_SYS_ADMIN" in added):
        yield f"{path}.securityContext: a privileged container cannot disallow privilege escalation"


def _probe(probe: Object, kind: str, ports: set[str], path: str) -> Iterator[str]:
    yield from _exactly_one(probe, path, _HANDLERS)
    for key in ("initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"):
        yield from _within(probe.get(key, 1), 0 if key == "initialDelaySeconds" else 1, 2**31 - 1, f"{path}.{key}")
    if kind != "readinessProbe":
        yield from _one_of(probe.get("successThreshold", 1), [1], f"{path}.successThreshold")
    elif "terminationGracePeriodSeconds" in probe:
        yield f"{path}.terminationGracePeriodSeconds: not allowed for readiness probes"
    if handler := probe.get("httpGet", probe.get("tcpSocket")):
        port = handler.get("port")
        if isinstance(port, str):
            yield from _one_of(port, sorted(filter(None, ports)), f"{path}.port")
        else:
            yield from _within(port, 1, 65535, f"{path}.port")
    if "httpGet" in probe and not probe["httpGet"].get("path", "/"):
        yield f"{path}.httpGet.path: required"


def _environment(variables: list[Object], path: str) -> Iterator[str]:
    yield from _unique((each["name"] for each in variables), path)
    for each in variables:
        yield from _matches(_VARIABLE, each["name"], f"{path}.name")
        if "valueFrom" not in each:
            continue
        if each.get("value"):
            yield f"{path}[{each['name']}]: expected value or valueFrom, got both"
        yield from _exactly_one(each["valueFrom"], f"{path}[{each['name']}].valueFrom")


def quantity(text: object) -> Decimal | None:
    """Return the number that a quantity such as ``500m`` or ``2Gi`` states, or None if it is none."""
    if not (found := _QUANTITY.fullmatch(str(text))):
        return None
    number, unit = found[1], found[2] or ""
    if unit[:1] in ("e", "E") and len(unit) > 1 and unit != "Ei":
        return Decimal(number + unit)
    return Decimal(number) * (Decimal("0.001") if unit == "m" else _SCALES.get(unit, Decimal(1)))


def _resources(resources: Object, path: str) -> Iterator[str]:
    amounts: dict[str, dict[str, Decimal]] = {}
    for part in ("limits", "requests"):
        for name, text in resources.get(part, {}).items():
            if (amount := quantity(text)) is None:
                yield f"{path}.{part}.{name}: invalid {text!r}"
            else:
                amounts.setdefault(part, {})[name] = amount
    for name, limit in amounts.get("limits", {}).items():
        if (requested := amounts.get("requests", {}).get(name, limit)) > limit:
            yield f"{path}.requests.{name}: expected at most the limit {limit}, got {requested}"


def _toleration(toleration: Object, path: str) -> Iterator[str]:
    operator = toleration.get("operator", "Equal")
    yield from _one_of(operator, ["Equal", "Exists"], f"{path}.operator")
    if operator == "Exists" and toleration.get("value"):
        yield f"{path}.value: not allowed with operator Exists"
    if operator != "Exists" and not toleration.get("key"):
        yield f"{path}.operator: expected Exists without a key"
    yield from _one_of(
        toleration.get("effect", ""), ["", "NoSchedule", "PreferNoSchedule", "NoExecute"], f"{path}.effect"
    )
    if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
        yield f"{path}.tolerationSeconds: only allowed with effect NoExecute"


# Other kinds


def _deployment(document: Object) -> Iterator[str]:
    spec = document["spec"]
    template = spec["template"]
    labels = template["metadata"].get("labels", {})
    yield from _within(spec.get("replicas", 1), 0, 2**31 - 1, "spec.replicas")
    yield from _labels(labels, "spec.template.metadata.labels")
    for key, value in template["metadata"].get("annotations", {}).items():
        yield from _one_of(type(value), [str], f"spec.template.metadata.annotations.{key}")
    if not selects(spec["selector"], labels) or not spec["selector"]:
        yield f"spec.selector: {spec['selector']} does not select the labels of the template {labels}"
    rolling = spec.get("strategy", {}).get("rollingUpdate", {})
    if rolling and spec["strategy"].get("type") != "RollingUpdate":
        yield "spec.strategy.rollingUpdate: only allowed for type RollingUpdate"
    if rolling and {str(rolling.get(key, "25%")).rstrip("%") for key in ("maxSurge", "maxUnavailable")} == {"0"}:
        yield "spec.strategy.rollingUpdate: maxSurge and maxUnavailable are both 0"
    yield from _one_of(template["spec"].get("restartPolicy", "Always"), ["Always"], "spec.template.spec.restartPolicy")
    yield from _pod(template["spec"], "spec.template.spec")


def _service(document: Object) -> Iterator[str]:
    spec = document["spec"]
    ports = spec.get("ports", [])
    if not ports:
        yield "spec.ports: required"
    yield from _one_of(spec.get("type", "ClusterIP"), ["ClusterIP", "NodePort", "LoadBalancer"], "spec.type")
    yield from _unique((each.get("name", "") for each in ports), "spec.ports")
    yield from _unique(((each["port"], each.get("protocol", "TCP")) for each in ports), "spec.ports")
    yield from _labels(spec.get("selector", {}), "spec.selector")
    for port in ports:
        yield from _within(port["port"], 1, 65535, "spec.ports.port")
        if "name" in port or len(ports) > 1:
            yield from _matches(_LABEL, port.get("name"), "spec.ports.name")
        if isinstance(target := port.get("targetPort", port["port"]), str):
            yield from _matches(_PORT_NAME, target, "spec.ports.targetPort")
        else:
            yield from _within(target, 1, 65535, "spec.ports.targetPort")
        if "appProtocol" in port:
            yield from _matches(_QUALIFIED, port["appProtocol"], "spec.ports.appProtocol")


def _config_map(document: Object) -> Iterator[str]:
    data = document.get("data", {})
    for key in data:
        yield from _matches(_DATA_KEY, key, "data key")
    if sum(len(value.encode()) for value in data.values()) > _MOST_CONFIG_BYTES:
        yield f"data: expected at most {_MOST_CONFIG_BYTES} bytes"


def _disruption_budget(document: Object) -> Iterator[str]:
    yield from _exactly_one(document["spec"], "spec", {"minAvailable", "maxUnavailable"})


def _autoscaler(document: Object) -> Iterator[str]:
    spec = document["spec"]
    least, most = spec.get("minReplicas", 1), spec["maxReplicas"]
    yield from _within(least, 1, 2**31 - 1, "spec.minReplicas")
    yield from _within(most, least, 2**31 - 1, "spec.maxReplicas")
    for metric in spec.get("metrics", []):
        source = metric["type"][:1].lower() + metric["type"][1:]
        yield from _exactly_one(metric.keys() - {"type"}, "spec.metrics")
        target = metric.get(source, {}).get("target", {})
        yield from _exactly_one(target.keys() - {"type"}, "spec.metrics.target")
        value = target.get("value", target.get("averageValue", target.get("averageUtilization")))
        if not (amount := quantity(value)) or amount <= 0:
            yield f"spec.metrics.target: expected a positive quantity, got {value!r}"


def _network_policy(document: Object) -> Iterator[str]:
    for number, rule in enumerate(document["spec"].get("ingress", [])):
        for port in rule.get("ports", []):
            if isinstance(port.get("port"), str):
                yield from _matches(_PORT_NAME, port["port"], f"spec.ingress[{number}].ports")
        for peer in rule.get("from", []):
            if not peer or ("ipBlock" in peer and len(peer) > 1):
                yield f"spec.ingress[{number}].from: expected selectors or an ipBlock, got {sorted(peer)}"


def _scaled_object(document: Object) -> Iterator[str]:
    spec = document["spec"]
    yield from _within(spec.get("minReplicaCount", 0), 0, spec.get("maxReplicaCount", 100), "spec.minReplicaCount")


def _runtime(document: Object) -> Iterator[str]:
    # The controller of KServe adds the volumes of models and the name of the container's model.
    yield from _pod({"containers": document["spec"]["containers"]}, "spec")


_RULES: Final[dict[str, Callable[[Object], Iterator[str]]]] = {
    "ClusterServingRuntime": _runtime,
    "ConfigMap": _config_map,
    "Deployment": _deployment,
    "HorizontalPodAutoscaler": _autoscaler,
    "NetworkPolicy": _network_policy,
    "PodDisruptionBudget": _disruption_budget,
    "ScaledObject": _scaled_object,
    "Service": _service,
}


# References between objects


def selects(selector: Object, labels: Object) -> bool:
    """Report whether a selector, or a map of labels, selects labels."""
    wanted = selector.get("matchLabels", selector)
    return all(labels.get(key) == value for key, value in wanted.items())


def _references(objects: list[Object]) -> Iterator[str]:
    by_kind: dict[str, list[Object]] = {}
    for each in objects:
        by_kind.setdefault(each["kind"], []).append(each)
    names = {kind: [each["metadata"]["name"] for each in found] for kind, found in by_kind.items()}
    templates = [each["spec"]["template"] for each in by_kind.get("Deployment", [])]
    for spec in (template["spec"] for template in templates):
        for volume in spec.get("volumes", []):
            if "configMap" in volume:
                yield from _one_of(volume["configMap"]["name"], names.get("ConfigMap", []), f"volume {volume['name']}")
        if "serviceAccountName" in spec:
            yield from _one_of(spec["serviceAccountName"], names.get("ServiceAccount", []), "serviceAccountName")
    for each in by_kind.get("HorizontalPodAutoscaler", []) + by_kind.get("ScaledObject", []):
        yield from _one_of(each["spec"]["scaleTargetRef"]["name"], names.get("Deployment", []), "scaleTargetRef")
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
        for each in by_kind.get(kind, []):
            yield from _selection(each, templates)
    for each in by_kind.get("ServiceMonitor", []):
        yield from _monitored(each, by_kind.get("Service", []))


def _selection(document: Object, templates: list[Object]) -> Iterator[str]:
    spec = document["spec"]
    place = f"{document['kind']} {document['metadata']['name']}"
    selector = spec.get("selector", spec.get("podSelector"))
    selected = [pod["spec"] for pod in templates if selects(selector, pod["metadata"].get("labels", {}))]
    if not selected:
        yield f"{place}: selects no pods"
    names = {port.get("name") for pod in selected for each in pod["containers"] for port in each.get("ports", [])}
    ports = [port for rule in (spec, *spec.get("ingress", [])) for port in rule.get("ports", [])]
    for target in (port.get("targetPort", port.get("port")) for port in ports):
        if isinstance(target, str):
            yield from _one_of(target, names, f"{place} port")


def _monitored(document: Object, services: list[Object]) -> Iterator[str]:
    spec = document["spec"]
    selected = [each for each in services if selects(spec["selector"], each["metadata"].get("labels", {}))]
    names = {port.get("name") for each in selected for port in each["spec"]["ports"]}
    for endpoint in spec["endpoints"]:
        yield from _one_of(endpoint.get("port"), names, f"ServiceMonitor {document['metadata']['name']} port")
