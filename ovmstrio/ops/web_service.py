"""WebService: a named pipeline that a script defines and runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.ops.graph import OpGraph, build
from ovmstrio.ops.op import Op, RequestOp, ResponseOp

RunService = Callable[["WebService"], None]

_runners: list[RunService] = []
_default_runners: list[RunService] = []


def set_service_runner(runner: RunService | None) -> RunService | None:
    """Set what ``run_service`` does, such as serving or recording the service; return the previous runner."""
    before = _runners[0] if _runners else None
    _runners[:] = [] if runner is None else [runner]
    return before


def set_default_runner(runner: RunService) -> None:
    """Set what ``run_service`` does in a script run by Python: a higher layer starts the server."""
    _default_runners[:] = [runner]


class WebService:
    """Base class of services; scripts override :meth:`get_pipeline_response`.

    Args:
        name: service name in requests.

    Attributes:
        yml_file: configuration file, if any.
        yml_dict: configuration, if not a file.
        response_op: end of the prepared pipeline.
    """

    def __init__(self, name: str = "default_service") -> None:
        self.name = name
        self.yml_file: str | None = None
        self.yml_dict: Mapping[str, Any] | None = None
        self.response_op: ResponseOp | None = None

    def get_pipeline_response(self, read_op: Op) -> Op | None:
        """Return the last Op of a pipeline that starts with ``read_op``; override this."""
        del read_op
        return None

    def prepare_pipeline_config(self, yml_file: str | None = None, yml_dict: Mapping[str, Any] | None = None) -> None:
        """Create the Ops and set exactly one configuration; ValueError if that or the last Op is missing."""
        if (yml_file is None) == (yml_dict is None):
            raise ValueError("prepare_pipeline_config needs exactly one of yml_file and yml_dict")
        last = self.get_pipeline_response(RequestOp())
        if not isinstance(last, Op):
            raise ValueError(  # noqa: TRY004 - Paddle Serving's exception
                f"get_pipeline_response of service {self.name} must return the last Op, got {type(last).__name__}"
            )
        self.yml_file, self.yml_dict = yml_file, yml_dict
        self.response_op = last if isinstance(last, ResponseOp) else ResponseOp(input_ops=[last])

    def graph(self) -> OpGraph:
        """Return the graph of the prepared pipeline; ConfigError if it is not prepared or invalid."""
        if self.response_op is None:
            raise ConfigError([Problem(f"service {self.name}: call prepare_pipeline_config before run_service")])
        return build(self.response_op)

    def run_service(self) -> None:
        """Serve the pipeline until the server ends; SystemExit if it cannot start."""
        (_runners or _default_runners)[0](self)
