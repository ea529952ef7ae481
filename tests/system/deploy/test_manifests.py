"""Plain manifests and KServe's runtimes against the schemas of the API."""

from __future__ import annotations

import pytest

from tests.support.manifests import DEPLOY, PLAIN, check_document, kinds_of, read_documents

_KSERVE = DEPLOY / "kserve" / "cluster-serving-runtime.yaml"


def test_plain_manifests_are_what_the_api_takes() -> None:
    """In the oldest and the newest release that the chart is for."""
    documents = read_documents(PLAIN.read_text())
    for each in documents:
        check_document(each)
    assert kinds_of(documents) == ["ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "ServiceAccount"]


def test_a_wrong_name_would_be_seen() -> None:
    """The schemas are strict: a member that nobody knows is refused."""
    (deployment,) = [each for each in read_documents(PLAIN.read_text()) if each["kind"] == "Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    import kubernetes_validate

    with pytest.raises(kubernetes_validate.ValidationError):
        check_document(deployment)


def test_the_grace_of_pods_is_longer_than_their_drain() -> None:
    """Or Kubernetes would kill them amid calls."""
    (deployment,) = [each for each in read_documents(PLAIN.read_text()) if each["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    options = dict(text.removeprefix("--").split("=") for text in spec["containers"][0]["args"] if "=" in text)
    drain = int(options["drain_delay"]) + int(options["drain_seconds"])
    assert drain < spec["terminationGracePeriodSeconds"]


def test_runtimes_for_kserve_are_what_its_definitions_take() -> None:
    """The runtimes by KServe's own schema, their containers as those of a pod."""
    runtimes = read_documents(_KSERVE.read_text())
    for runtime in runtimes:
        check_document(runtime)
        spec = {"containers": runtime["spec"]["containers"]}
        check_document({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    assert [each["metadata"]["name"] for each in runtimes] == ["ovmstrio", "ovmstrio-config"]
