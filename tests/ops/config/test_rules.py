from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from ovmstrio.runtimes.ops.config import rules
from ovmstrio.runtimes.ops.config.op_settings import (
    DagSettings,
    LocalServiceConf,
    LoggingSettings,
    OpSettings,
    PipelineSettings,
    TracerSettings,
)

_GUIDE = Path(__file__).parents[3] / "docs" / "ops.md"
_BLOCKS = [
    (rules.TOP, PipelineSettings, {"grpc_gateway_port"}),
    (rules.DAG, DagSettings, set()),
    (rules.TRACER, TracerSettings, set()),
    (rules.OP, OpSettings, set()),
    (rules.LOCAL, LocalServiceConf, set()),
    (rules.LOGGING, LoggingSettings, set()),
]


@pytest.mark.parametrize(("block", "settings", "dropped"), _BLOCKS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_key_is_a_setting(block: rules.Rules, settings: type, dropped: set[str]) -> None:
    """What a block can have is what its settings have, so that no key is read in vain."""
    assert set(block) - dropped <= {field.name for field in fields(settings)}


def test_every_key_is_in_the_guide() -> None:
    """The guide names each key, and those without effect as well."""
    text = _GUIDE.read_text()
    missing = {key for block, _, _ in _BLOCKS for key in block if f"`{key}`" not in text and f".{key}`" not in text}
    assert not missing
