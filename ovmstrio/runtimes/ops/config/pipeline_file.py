"""``config.yml`` as settings: every problem of it is told at once, with its line and the way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from ovmstrio.config.findings import Findings, by_line
from ovmstrio.config.json_locations import Located
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.ops.config.blocks import Block, Notes
from ovmstrio.runtimes.ops.config.documents import NO_LINE, read_document
from ovmstrio.runtimes.ops.config.op_settings import (
    DagSettings,
    LocalServiceConf,
    LoggingSettings,
    OpSettings,
    PipelineSettings,
    TracerSettings,
)
from ovmstrio.runtimes.ops.config.rules import DAG, LOCAL, LOGGING, OP, TOP, TRACER

__all__ = ["ExaminedConfig", "examine_pipeline_config", "read_pipeline_config"]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ExaminedConfig:
    """A configuration with all there is to say of it.

    Attributes:
        settings: what it says, with defaults in the place of what cannot be used.
        problems: what is wrong with it, in the order of its lines.
        without_effect: by the path of a key that has no effect here, why.
    """

    settings: PipelineSettings
    problems: tuple[Problem, ...]
    without_effect: Mapping[str, str]
    _root: Located
    _findings: Findings

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems because of which it cannot be used."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    def place(self, problem: Problem) -> Problem:
        """Give a problem that was found later the place of its path; one of another file, or without a path, stays."""
        if problem.file or not problem.path:
            return problem
        return _placed(self._findings.place(self._root, problem))


def read_pipeline_config(
    yml_file: str | Path | None = None,
    yml_dict: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> PipelineSettings:
    """Read ``config.yml``, or a dictionary in its place; blocking where it is a file.

    Unknown keys are warned about, keys that have no effect here are told at debug level.

    Args:
        yml_file: the file.
        yml_dict: what would be in it.
        overrides: options that are put over it, such as ``op.uci.concurrency=2``.

    Raises:
        ConfigError: something in it cannot be used, or not exactly one of file and dictionary is given.
    """
    examined = examine_pipeline_config(yml_file, yml_dict, overrides)
    if examined.errors:
        raise ConfigError(examined.errors)
    for problem in examined.problems:
        _log.warning("configuration", problem=str(problem))
    for key, reason in examined.without_effect.items():
        _log.debug("key without effect", key=key, reason=reason)
    return examined.settings


def examine_pipeline_config(
    yml_file: str | Path | None = None,
    yml_dict: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> ExaminedConfig:
    """Read as :func:`read_pipeline_config`, but hand over what is wrong, and what has no effect, with the settings.

    Raises:
        ConfigError: there is nothing to read.
    """
    if (yml_file is None) == (yml_dict is None):
        raise ConfigError([Problem("give either yml_file or yml_dict", suggestion="give one of the two")])
    source = Path(yml_file) if yml_file is not None else yml_dict or {}
    root, findings = read_document(source, overrides)
    notes = Notes(findings)
    settings = _pipeline(Block("", root, notes), source if isinstance(source, Path) else None)
    problems = map(_placed, by_line([*findings.fatal, *findings.problems]))
    return ExaminedConfig(settings, tuple(problems), notes.without_effect, root, findings)


def _placed(problem: Problem) -> Problem:
    return replace(problem, line=None) if problem.line == NO_LINE else problem


def _pipeline(top: Block, source: Path | None) -> PipelineSettings:
    values = top.read(TOP)
    values.pop("grpc_gateway_port", None)
    entries = top.block("op", "ops")
    ops = {str(name): _op(str(name), entries.block(name, "op")) for name in entries.names}
    dag = _dag(top.block("dag"))
    _check_ports(top, values, dag.prometheus_port)
    return PipelineSettings(
        **values,
        dag=dag,
        ops=ops,
        logging=LoggingSettings(**top.block("logging").read(LOGGING)),
        source=source,
    )


def _check_ports(top: Block, values: Mapping[str, Any], metrics: int | None) -> None:
    refuse = top.notes.findings.refuse
    given = top.members
    if "rpc_port" not in given and "http_port" not in given:
        refuse(top.node, "rpc_port and http_port are both missing", suggestion="give one of them, or both")
    rpc, http = values.get("rpc_port"), values.get("http_port")
    if rpc and rpc == http:
        refuse(given["http_port"], f"port {rpc} is that of rpc_port already", suggestion="give another port")
    if rpc and rpc == metrics:
        node = top.block("dag").members["prometheus_port"]
        refuse(node, f"port {rpc} is that of rpc_port already", suggestion="give another port, or that of http_port")


def _dag(block: Block) -> DagSettings:
    values = block.read(DAG)
    given = block.members
    if values.get("enable_prometheus") and "prometheus_port" not in given:
        message = "no prometheus_port is given: metrics are at /metrics of http_port alone"
        block.notes.findings.warn(given["enable_prometheus"], message)
    if "prometheus_port" in given and not values.get("enable_prometheus"):
        block.notes.findings.warn(given["prometheus_port"], "prometheus_port has no effect without enable_prometheus")
    return DagSettings(**values, tracer=TracerSettings(**block.block("tracer").read(TRACER)))


def _op(name: str, block: Block) -> OpSettings:
    values = block.read(OP)
    return OpSettings(
        name, **values, local_service_conf=LocalServiceConf(**block.block("local_service_conf").read(LOCAL))
    )
