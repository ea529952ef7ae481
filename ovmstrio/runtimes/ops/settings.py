"""The settings of a pipeline, under the name by which the parts that run it know them."""

from __future__ import annotations

from ovmstrio.runtimes.ops.config.op_settings import (
    DagSettings,
    LocalServiceConf,
    OpSettings,
    PipelineSettings,
    TracerSettings,
)
from ovmstrio.runtimes.ops.config.precedence import settings_of

__all__ = ["DagSettings", "LocalServiceConf", "OpSettings", "PipelineSettings", "TracerSettings", "settings_of"]
