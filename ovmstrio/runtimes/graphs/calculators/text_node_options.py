"""The settings of a model of text that a node of a graph names, as the graph's file has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.config.findings import Findings
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.config.text_options import read_text_options
from ovmstrio.runtimes.graphs.calculators.nodes import options_of

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.config.located import Located
    from ovmstrio.core.errors import Problem
    from ovmstrio.runtimes.graphs.calculators.text_models import TextModelCalculator
    from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig

__all__ = ["read_node_options", "spec_of_node"]

_PATH: Final = "models_path"
_SPELT: Final[Mapping[str, str]] = {"device": "target_device", "normalize_embeddings": "normalize"}
"""Options that a graph calls otherwise than all else does."""
_UNMENTIONED: Final = frozenset({_PATH})


def read_node_options(
    node: NodeConfig, calculator: TextModelCalculator, directory: Path, findings: Findings
) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """Give the fields of ``TextModelSpec`` that a node's options say, ``path`` among them, and what is wrong.

    Relative paths lead on from ``directory``; problems have the places of options in the file of ``findings``.
    """
    fields, problems = read_text_options(calculator.task, _given_options(node, calculator), directory)
    message = options_of(node, calculator.options)
    fields["path"] = directory / (message.models_path if message is not None else "")
    return fields, tuple(_placed(problem, node, calculator, findings) for problem in problems)


def spec_of_node(
    node: NodeConfig, calculator: TextModelCalculator, directory: Path, *, name: str, cache_dir: Path | None = None
) -> TextModelSpec:
    """Give the model of a node that stands among others, whose options have been examined; see ``examine_graph``."""
    findings = Findings("")
    fields, problems = read_node_options(node, calculator, directory, findings)
    return TextModelSpec(
        name=name, base_path=directory, cache_dir=cache_dir, task=calculator.task, problems=problems, **fields
    )


def _given_options(node: NodeConfig, calculator: TextModelCalculator) -> dict[str, Any]:
    """Give what the file says, by the names of options; texts of enumerations are their names."""
    message = options_of(node, calculator.options)
    if message is None:
        return {}
    given: dict[str, Any] = {}
    for known, value in message.ListFields():
        name = _SPELT.get(known.name, known.name)
        if known.enum_type is not None:
            given[name] = known.enum_type.values_by_number[value].name
        elif known.is_repeated and known.message_type is not None:
            given[name] = [{inner.name: held for inner, held in each.ListFields()} for each in value]
        elif name not in _UNMENTIONED and (value or not isinstance(value, str)):
            given[name] = str(value) if known.message_type is not None else value
    return given


def _placed(problem: Problem, node: NodeConfig, calculator: TextModelCalculator, findings: Findings) -> Problem:
    """Point at the option in the file, which may be in ``node_options`` or ``options``."""
    written = {option: name for name, option in _SPELT.items()}
    option, *_ = problem.path.split(".")
    for options in _all_options(node, calculator):
        name = option if option in options.members else written.get(option, option)
        if name in options.members:
            return replace(findings.place(options, replace(problem, path=name)))
    return findings.place(node.at, replace(problem, path=""))


def _all_options(node: NodeConfig, calculator: TextModelCalculator) -> list[Located]:
    packed = [each for item in node.at.items("node_options") for each in item.members.values()]
    return [*packed, node.at.find("options", f"{calculator.options}.ext")]
