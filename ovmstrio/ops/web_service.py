"""A service: a pipeline with a name, as a script describes and runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.ops.graph import OpGraph, build
from ovmstrio.ops.op import Op, RequestOp, ResponseOp

__all__ = ["WebService", "set_default_runner", "set_service_runner"]

RunService = Callable[["WebService"], None]

_runners: list[RunService] = []
_default_runners: list[RunService] = []


def set_service_runner(runner: RunService | None) -> RunService | None:
    """Set what ``run_service`` of every service does from now on: serve it until it ends, or only note it.

    Returns:
        What it did before.
    """
    before = _runners[0] if _runners else None
    _runners[:] = [] if runner is None else [runner]
    return before


def set_default_runner(runner: RunService) -> None:
    """Set what ``run_service`` does in a script that Python runs: a module above this one starts the server."""
    _default_runners[:] = [runner]


class WebService:
    """Subclassed by scripts, which override :meth:`get_pipeline_response`.

    Args:
        name: what requests must call the service.

    Attributes:
        yml_file: the configuration's file, if it is one.
        yml_dict: the configuration itself, if it is no file.
        response_op: the end of the pipeline, once it is prepared.
    """

    def __init__(self, name: str = "default_service") -> None:
        self.name = name
        self.yml_file: str | None = None
        self.yml_dict: Mapping[str, Any] | None = None
        self.response_op: ResponseOp | None = None

    def get_pipeline_response(self, read_op: Op) -> Op | None:
        """Give the last Op of a pipeline that begins with ``read_op``; to be overridden."""
        del read_op
        return None

    def prepare_pipeline_config(self, yml_file: str | None = None, yml_dict: Mapping[str, Any] | None = None) -> None:
        """Make the Ops, and note where the configuration is.

        Raises:
            ValueError: both configurations or neither are given, or :meth:`get_pipeline_response` gives no Op.
        """
        if (yml_file is None) == (yml_dict is None):
            raise ValueError("prepare_pipeline_config needs exactly one of yml_file and yml_dict")
        last = self.get_pipeline_response(RequestOp())
        if not isinstance(last, Op):
            raise ValueError(  # noqa: TRY004 - what scripts know
                f"get_pipeline_response of service {self.name} must return the last Op, got {type(last).__name__}"
            )
        self.yml_file, self.yml_dict = yml_file, yml_dict
        self.response_op = last if isinstance(last, ResponseOp) else ResponseOp(input_ops=[last])

    def graph(self) -> OpGraph:
        """Give the prepared pipeline's graph.

        Raises:
            ConfigError: it is not prepared, or no pipeline can be made of its Ops.
        """
        if self.response_op is None:
            raise ConfigError([Problem(f"service {self.name} is run before prepare_pipeline_config was called")])
        return build(self.response_op)

    def run_service(self) -> None:
        """Serve the pipeline until it ends.

        Raises:
            SystemExit: the server could not start.
        """
        (_runners or _default_runners)[0](self)
