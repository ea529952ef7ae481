"""Validation of a pipeline without serving it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.config.documents import did_you_mean
from ovmstrio.config.specs import PipelineSpec
from ovmstrio.core.errors import Problem
from ovmstrio.pipelines.structure import PipelineErrorCode, node_problem, validate_structure

if TYPE_CHECKING:
    from collections.abc import Collection


def examine_pipeline(spec: PipelineSpec, configured: Collection[str]) -> list[Problem]:
    """Return the problems of a pipeline's settings, structure and model names."""
    _, problems = validate_structure(spec)
    others = [name for name in configured if name != spec.name]
    for node in spec.nodes:
        if node.model_name and node.model_name not in configured:
            message = f"no model {node.model_name!r} is configured"
            hint = did_you_mean(node.model_name, others, otherwise=f"known: {', '.join(others) or 'none'}")
            problems.append(node_problem(node, PipelineErrorCode.MODEL_MISSING, message, hint))
    return [*spec.problems, *problems]
