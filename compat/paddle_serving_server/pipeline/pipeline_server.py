"""``PipelineServer``: a service whose Ops a script joins itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.ext.ops import Op, ResponseOp, WebService

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PipelineServer"]


class PipelineServer:
    """Serves a pipeline; without a name it answers only requests that name no service."""

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        self._response_op: ResponseOp | None = None
        self._service: WebService | None = None

    def set_response_op(self, response_op: ResponseOp) -> None:
        """Set the end of the pipeline.

        Raises:
            TypeError: it is not a ResponseOp.
            ValueError: it has not exactly one input.
        """
        if not isinstance(response_op, ResponseOp):
            raise TypeError(f"response_op must be a ResponseOp, got {type(response_op).__name__}")
        if len(response_op.get_input_ops()) != 1:
            raise ValueError(f"response_op must have one input, got {len(response_op.get_input_ops())}")
        self._response_op = response_op

    def prepare_server(self, yml_file: str | None = None, yml_dict: Mapping[str, Any] | None = None) -> None:
        """Note where the configuration is.

        Raises:
            ValueError: both configurations or neither are given, or there is no ResponseOp.
        """
        service = _Prepared(self._name, self._response_op)
        service.prepare_pipeline_config(yml_file, yml_dict)
        self._service = service

    def run_server(self) -> None:
        """Serve until the server is told to end.

        Raises:
            ValueError: it is not prepared.
            ConfigError: it cannot start.
        """
        if self._service is None:
            raise ValueError("run_server needs prepare_server to be called first")
        self._service.run_service()


class _Prepared(WebService):
    """A service whose pipeline is joined already."""

    def __init__(self, name: str | None, response_op: ResponseOp | None) -> None:
        super().__init__("" if name is None else name)
        self._end = response_op

    def get_pipeline_response(self, read_op: Op) -> Op | None:
        """Give the end of the pipeline, which has a RequestOp of its own."""
        del read_op
        return self._end
