"""The application of a configuration for Ray: what is refused, before there is a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")

PATIENCE_SECONDS = 300

# Imported, Ray would leave much behind in this process.
PROGRAM = """
import json, sys
from ovmstrio.cluster.ray.application import application
from ovmstrio.core.errors import ConfigError
told = []
for args in json.loads(sys.stdin.read()):
    try:
        application(args)
    except ConfigError as error:
        told.append([str(problem) for problem in error.problems])
    else:
        told.append([])
print(json.dumps(told))
"""

CASES: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"ingress": {"group": "ingress"}, "several": True}, ""),
    ({"ingress": {"replicas": 2}, "several": True}, ""),
    ({"settings": {"max_message_size": "much"}}, "settings.max_message_size: the value cannot be used"),
    ({"settings": {"max_message_size": 1}}, "(expected 1024 or more, found 1)"),
    ({"settings": {"port": 1}}, "settings that have no meaning in a replica: port"),
    ({"setting": {}}, "setting: the value cannot be used (expected one of config, settings, ingress"),
    ({"ingress": []}, "ingress: the value cannot be used"),
    ({"ingress": {"replicas": 0}}, "ingress.replicas: the value cannot be used (expected 1 or more, found 0)"),
    ({"ingress": "x", "several": True}, 'the group in front of all others is "ingress"'),
    ({"ingress": {"replicas": 2}}, 'say it in the "placement" of "m"'),
]


def test_arguments_that_cannot_be_used_or_would_be_ignored_are_refused(tmp_path: Path) -> None:
    entries = [{"config": {"name": name, "base_path": name}} for name in ("m", "n")]
    for name, count in (("one", 1), ("two", 2)):
        (tmp_path / name).write_text(json.dumps({"model_config_list": entries[:count]}))
    given = [
        {"config": str(tmp_path / ("two" if args.get("several") else "one")), **args, "several": None}
        for args, _ in CASES
    ]
    for args in given:
        del args["several"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for (_, expected), problems in zip(CASES, json.loads(done.stdout), strict=True):
        assert bool(problems) == bool(expected), problems
        assert expected in "".join(problems)
