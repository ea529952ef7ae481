"""``ovms deploy ray`` without Ray, and with wrong options."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_command


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a configuration of one model."""
    monkeypatch.setenv("COLUMNS", "500")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_config_list": [{"config": {"name": "m", "base_path": "m"}}]}))
    return str(path)


def test_without_ray_the_message_names_the_extra(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of a traceback."""
    for name in [name for name in sys.modules if name.startswith("ovmstrio.cluster.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    done = run_command("deploy", "ray", config)
    assert done.exit_code == 1
    assert "ray is not installed: " in done.output
    assert "[ray]" in done.output or "ray[serve]" in done.output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--setting", "cache_dir"], "--setting cache_dir: expected NAME=VALUE"),
        (["--ingress", "two"], "--ingress two: expected an object of JSON"),
    ],
)
def test_malformed_options_are_refused(config: str, options: list[str], text: str) -> None:
    """With the expected form."""
    done = run_command("deploy", "ray", config, *options)
    assert (done.exit_code, text in done.output) == (1, True)
