"""Stub and servicer of the pipeline service for grpcio."""

from __future__ import annotations

from typing import Any

import grpc

from ovmstrio.encoding.messages import METHOD, REQUEST, RESPONSE, SERVICE

__all__ = ["PipelineServiceServicer", "PipelineServiceStub", "add_PipelineServiceServicer_to_server"]


class PipelineServiceStub:
    """Client stub with the method ``inference``."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.inference = channel.unary_unary(
            METHOD, request_serializer=REQUEST.SerializeToString, response_deserializer=RESPONSE.FromString
        )


class PipelineServiceServicer:
    """Base class of servicers."""

    def inference(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Return the response to a request; override this."""
        raise NotImplementedError("override inference")


def add_PipelineServiceServicer_to_server(  # noqa: N802 - the name that scripts import
    servicer: PipelineServiceServicer, server: grpc.Server
) -> None:
    """Register a servicer with a grpcio server."""
    handler = grpc.unary_unary_rpc_method_handler(
        servicer.inference, request_deserializer=REQUEST.FromString, response_serializer=RESPONSE.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"inference": handler}),))
