"""The settings of a pipeline, under the name by which the parts that run it know them."""

from __future__ import annotations

from ovmstrio.ops.config.precedence import settings_of
from ovmstrio.ops.config.settings import DagSettings, LocalServiceConf, OpSettings, PipelineSettings, TracerSettings

__all__ = ["DagSettings", "LocalServiceConf", "OpSettings", "PipelineSettings", "TracerSettings", "settings_of"]
