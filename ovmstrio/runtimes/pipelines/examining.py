"""What can be said of a pipeline without anything that it calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.config.findings import did_you_mean
from ovmstrio.runtimes.pipelines.pipeline_problems import Code, problem_of
from ovmstrio.runtimes.pipelines.structure import examine_structure

if TYPE_CHECKING:
    from collections.abc import Collection

    from ovmstrio.config.specs import PipelineSpec
    from ovmstrio.core.errors import Problem

__all__ = ["examine_pipeline"]


def examine_pipeline(spec: PipelineSpec, configured: Collection[str]) -> list[Problem]:
    """Find what is wrong with a pipeline's settings, its structure, and the names of the models that it calls."""
    _, problems = examine_structure(spec)
    others = [name for name in configured if name != spec.name]
    for node in spec.nodes:
        if node.model_name and node.model_name not in configured:
            message = f"no model {node.model_name!r} is configured"
            hint = did_you_mean(node.model_name, others, otherwise=f"known are {', '.join(others) or 'none'}")
            problems.append(problem_of(node, Code.MODEL_MISSING, message, hint))
    return [*spec.problems, *problems]
