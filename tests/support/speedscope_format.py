"""The format of sampled profiles of speedscope."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

_NUMBER: dict[str, Any] = {"type": "number", "minimum": 0}
_FORMAT: dict[str, Any] = {
    "type": "object",
    "required": ["$schema", "shared", "profiles"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"const": "https://www.speedscope.app/file-format-schema.json"},
        "exporter": {"type": "string"},
        "name": {"type": "string"},
        "activeProfileIndex": _NUMBER,
        "shared": {
            "type": "object",
            "required": ["frames"],
            "properties": {
                "frames": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string"},
                            "file": {"type": "string"},
                            "line": _NUMBER,
                            "col": _NUMBER,
                        },
                    },
                }
            },
        },
        "profiles": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "name", "unit", "startValue", "endValue", "samples", "weights"],
                "additionalProperties": False,
                "properties": {
                    "type": {"const": "sampled"},
                    "name": {"type": "string"},
                    "unit": {"enum": ["bytes", "microseconds", "milliseconds", "nanoseconds", "none", "seconds"]},
                    "startValue": _NUMBER,
                    "endValue": _NUMBER,
                    "samples": {"type": "array", "items": {"type": "array", "items": _NUMBER}},
                    "weights": {"type": "array", "items": _NUMBER},
                },
            },
        },
    },
}


def check_speedscope(document: Any) -> None:
    jsonschema.validate(document, _FORMAT)
    frames = len(document["shared"]["frames"])
    for profile in document["profiles"]:
        assert len(profile["samples"]) == len(profile["weights"])
        assert all(0 <= number < frames for stack in profile["samples"] for number in stack)
        assert profile["endValue"] == pytest.approx(sum(profile["weights"]))
