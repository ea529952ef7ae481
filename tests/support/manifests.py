"""Documents for Kubernetes, and their check against the schemas of its API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.crd_schemas import FOLDER

kubernetes_validate: Any = pytest.importorskip("kubernetes_validate")


DEPLOY = Path(__file__).parents[2] / "deploy"
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
