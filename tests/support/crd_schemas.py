"""Schemas of custom resources, from published definitions: ``python -m tests.support.crd_schemas CRD.yaml ...``.

What is kept is structure: types, names, what is required and which values there are.  Descriptions go, and so do the
containers of KServe's runtimes, which are a pod's and are checked as such.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "schemas"
_KEPT = frozenset({"type", "properties", "items", "required", "enum", "additionalProperties", "minimum", "maximum"})
_OF_PODS = frozenset({"containers", "workerSpec", "volumes", "affinity", "tolerations"})


def reduced(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the structural schema; objects reject unknown fields unless they allow any."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {key: value for key, value in schema.items() if key in _KEPT}
    if "items" in kept:
        kept["items"] = reduced(kept["items"])
    if isinstance(kept.get("additionalProperties"), dict):
        kept["additionalProperties"] = reduced(kept["additionalProperties"])
    if "properties" in kept:
        kept["properties"] = {
            name: {} if name in _OF_PODS else reduced(each) for name, each in kept["properties"].items()
        }
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            kept.setdefault("additionalProperties", False)
    return kept


def _main(paths: list[str]) -> None:
    for path in paths:
        found = yaml.safe_load(Path(path).read_text())["spec"]
        for version in found["versions"]:
            schema = reduced(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            name = f"{found['names']['kind']}.{found['group']}.{version['name']}.json"
            (FOLDER / name).write_text(json.dumps(schema, sort_keys=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    _main(sys.argv[1:])
