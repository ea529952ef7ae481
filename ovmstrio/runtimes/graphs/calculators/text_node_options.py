"""The settings of a model of text that a node of a graph names, as the graph's file has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.config.text_options import read_text_options
from ovmstrio.runtimes.graphs.calculators.nodes import options_of

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.config.findings import Findings
    from ovmstrio.config.located import Located
    from ovmstrio.core.errors import Problem
    from ovmstrio.core.generation import Task
    from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig

__all__ = ["read_node_options"]

_PATH: Final = "models_path"
_SPELT: Final[Mapping[str, str]] = {"device": "target_device", "normalize_embeddings": "normalize"}
"""Options that a graph calls otherwise than all else does."""
_UNMENTIONED: Final = frozenset({_PATH})


def read_node_options(
    node: NodeConfig, task: Task, message: str, directory: Path, findings: Findings
) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """Give the fields of ``TextModelSpec`` that a node's options say, ``path`` among them, and what is wrong.

    ``message`` is the full name of the message of these options.  Relative paths lead on from ``directory``; problems
    have the places of options in the file of ``findings``.
    """
    options = options_of(node, message)
    fields, problems = read_text_options(task, {} if options is None else _given_options(options), directory)
    fields["path"] = directory / ("" if options is None else options.models_path)
    return fields, tuple(_placed(problem, node, message, findings) for problem in problems)


def _given_options(message: Any) -> dict[str, Any]:
    """Give what the file says, by the names of options; texts of enumerations are their names."""
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


def _placed(problem: Problem, node: NodeConfig, message: str, findings: Findings) -> Problem:
    """Point at the option in the file, which may be in ``node_options`` or ``options``."""
    written = {option: name for name, option in _SPELT.items()}
    option, *_ = problem.path.split(".")
    for options in _all_options(node, message):
        name = option if option in options.members else written.get(option, option)
        if name in options.members:
            return replace(findings.place(options, replace(problem, path=name)))
    return findings.place(node.at, replace(problem, path=""))


def _all_options(node: NodeConfig, message: str) -> list[Located]:
    packed = [each for item in node.at.items("node_options") for each in item.members.values()]
    return [*packed, node.at.find("options", f"{message}.ext")]
