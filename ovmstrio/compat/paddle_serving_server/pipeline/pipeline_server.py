"""``PipelineServer``: a service whose Ops the script connects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.ext.ops import Op, ResponseOp, WebService

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PipelineServer"]


class PipelineServer:
    """Pipeline server; without a name it answers only requests without a service name."""

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        self._response_op: ResponseOp | None = None
        self._service: WebService | None = None

    def set_response_op(self, response_op: ResponseOp) -> None:
        """Set the end of the pipeline.

        Raises:
            TypeError: the Op is not a ResponseOp.
            ValueError: the Op does not have exactly one input.
        """
        if not isinstance(response_op, ResponseOp):
            raise TypeError(f"response_op must be a ResponseOp, got {type(response_op).__name__}")
        if len(response_op.get_input_ops()) != 1:
            raise ValueError(f"response_op must have one input, got {len(response_op.get_input_ops())}")
        self._response_op = response_op

    def prepare_server(self, yml_file: str | None = None, yml_dict: Mapping[str, Any] | None = None) -> None:
        """Set the configuration.

        Raises:
            ValueError: not exactly one configuration is given, or there is no ResponseOp.
        """
        service = _ConnectedService(self._name, self._response_op)
        service.prepare_pipeline_config(yml_file, yml_dict)
        self._service = service

    def run_server(self) -> None:
        """Serve until the server is stopped.

        Raises:
            ValueError: the server is not prepared.
            ConfigError: the server cannot start.
        """
        if self._service is None:
            raise ValueError("run_server needs prepare_server to be called first")
        self._service.run_service()


class _ConnectedService(WebService):
    def __init__(self, name: str | None, response_op: ResponseOp | None) -> None:
        super().__init__("" if name is None else name)
        self._end = response_op

    def get_pipeline_response(self, read_op: Op) -> Op | None:
        del read_op
        return self._end
