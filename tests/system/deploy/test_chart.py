"""The chart, rendered by Helm, against the schemas of the API."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.support.manifests import DEPLOY, PLAIN, check_document, read_documents

_HELM = os.environ.get("HELM") or shutil.which("helm")

pytestmark = pytest.mark.skipif(_HELM is None, reason="there is no helm on this machine")

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
    command = [
        _HELM,
        "template",
        "ovmstrio",
        str(DEPLOY / "helm" / "ovmstrio"),
        "-f",
        str(DEPLOY / "kubernetes" / "values.yaml"),
        *given,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_plain_manifests_are_those_of_the_chart() -> None:
    """Rendered with the values beside them."""
    assert read_documents(_render()) == read_documents(PLAIN.read_text())


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
    documents = read_documents(_render(*settings))
    for each in documents:
        check_document(each)
    assert kinds <= {each["kind"] for each in documents}
    (deployment,) = [each for each in documents if each["kind"] == "Deployment"]
    assert ("replicas" in deployment["spec"]) == (not {"HorizontalPodAutoscaler", "ScaledObject"} & kinds)


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
