"""Shared code of the graph samples' clients, which use only ``tritonclient``, as any KServe user would.

``tritonclient`` is not a dependency of the server; the extra ``samples`` installs it.
"""

from __future__ import annotations

import argparse
import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import numpy as np

from ovmstrio import Array
from ovmstrio.extras import Extra, install_command
from ovmstrio.samples import command_line

try:
    from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
    from tritonclient.utils import InferenceServerException, np_to_triton_dtype
except ModuleNotFoundError as missing:
    raise SystemExit(f"error: this client needs {missing.name}: {install_command(Extra.SAMPLES)}") from None

__all__ = [
    "InferenceServerClient",
    "InferenceServerException",
    "Reply",
    "Stream",
    "Value",
    "arguments",
    "as_input",
    "as_text",
    "failures_end_the_program",
]

Value = Array | bytes | str
"""An input: an array, or bytes or text for one BYTES element."""


class Reply(NamedTuple):
    """One output of a stream; outputs with the same timestamp belong together."""

    name: str
    value: Array
    timestamp: int


def as_input(name: str, value: Value) -> InferInput:
    """Create the input of a gRPC call."""
    if isinstance(value, str):
        value = value.encode()
    array = np.array([value], object) if isinstance(value, bytes) else value
    given = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    given.set_data_from_numpy(array)
    return given


def as_text(array: Array) -> str:
    """Decode the text that a Python node has sent."""
    return array.tobytes().decode()


class Stream:
    """One stream to one graph: requests and replies are independent."""

    def __init__(self, url: str, graph: str) -> None:
        self._client = InferenceServerClient(url)
        self._graph = graph
        self._arrived: queue.SimpleQueue[tuple[InferResult | None, InferenceServerException | None]] = (
            queue.SimpleQueue()
        )
        self._client.start_stream(lambda result, error: self._arrived.put((result, error)))

    def send(self, inputs: Mapping[str, Value], **parameters: bool | int | str) -> None:
        """Send one request; the graph reads ``parameters`` of the first request only."""
        given = [as_input(name, value) for name, value in inputs.items()]
        self._client.async_stream_infer(self._graph, given, parameters=parameters)

    def receive(self, timeout: float = 60) -> Reply:
        """Wait for the next reply.

        Raises:
            InferenceServerException: the server refused a request, or the stream failed.
        """
        result, error = self._arrived.get(timeout=timeout)
        if error is not None or result is None:
            raise error or InferenceServerException("the stream has ended")
        response = result.get_response()
        name = response.outputs[0].name
        return Reply(name, result.as_numpy(name), response.parameters["OVMS_MP_TIMESTAMP"].int64_param)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_reason: object) -> None:
        """End the stream and cancel its running requests."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


def arguments(purpose: str, model: str, given: Mapping[str, Any] | None = None) -> argparse.Namespace:
    """Parse the command line: ``url``, ``model`` and, if ``given`` has its argparse options, ``input``."""
    return command_line.arguments(purpose, url="localhost:9000", model=model, given=given)


@contextmanager
def failures_end_the_program() -> Iterator[None]:
    """Exit with a one-line message if the server returns an error."""
    try:
        yield
    except InferenceServerException as error:
        raise SystemExit(f"error: {error}") from error
