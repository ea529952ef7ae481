from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from ovmstrio.config.sections import rules_of
from ovmstrio.runtimes.ops.config.op_settings import (
    DagSettings,
    LocalServiceConf,
    LoggingSettings,
    OpSettings,
    PipelineSettings,
    TracerSettings,
)
from ovmstrio.runtimes.ops.config.pipeline_file import TOP_RULES

_GUIDE = Path(__file__).parents[4] / "docs" / "ops.md"
_SETTINGS = (PipelineSettings, DagSettings, TracerSettings, OpSettings, LocalServiceConf, LoggingSettings)
_NO_KEYS = {"name", "source", "folder"}
_BLOCKS = {"dag", "tracer", "ops", "local_service_conf", "logging"}


@pytest.mark.parametrize("settings", _SETTINGS)
def test_every_setting_is_a_key(settings: type) -> None:
    """What settings have is what their block can have, so that no key is read in vain, and none is forgotten."""
    assert {field.name for field in fields(settings)} - _NO_KEYS - _BLOCKS == set(rules_of(settings))


def test_every_key_is_in_the_guide() -> None:
    """The guide names each key, and those without effect as well."""
    text = _GUIDE.read_text()
    keys = {*TOP_RULES}.union(*(rules_of(settings) for settings in _SETTINGS))
    assert not {key for key in keys if f"`{key}`" not in text and f".{key}`" not in text}
