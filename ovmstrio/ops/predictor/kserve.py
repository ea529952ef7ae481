"""Predictors for models on other servers: KServe v2 over gRPC, and Paddle Serving pipelines."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import grpc
import numpy as np
import trio

from ovmstrio.core.errors import DeadlineExceeded, InvalidRequest, ModelFailure, NotReady, ServerError
from ovmstrio.core.tensor import Array
from ovmstrio.core.tracing import child_span
from ovmstrio.encoding.messages import METHOD, REQUEST, RESPONSE, message_class
from ovmstrio.encoding.raw_contents import datatype_of, from_raw, to_raw
from ovmstrio.encoding.status_errors import Unreachable, error_of_grpc, reading
from ovmstrio.ops.predictor.model_config import ModelConfig, Variable, check_fetch, check_names, check_types
from ovmstrio.ops.predictor.protocol import Feed, FeedTypeError
from ovmstrio.ops.tensors import LOD_SUFFIX, from_array, to_array
from ovmstrio.ops.values import add_tensor, tensor_from_message

# gRPC calls

_UNLIMITED: Final = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Endpoints:
    """Connections to equivalent servers at ``host:port``, used round-robin; unreachable servers are skipped."""

    def __init__(self, addresses: Sequence[str], *, timeout: float) -> None:
        self._timeout = timeout
        self._channels = [(address, grpc.insecure_channel(address, options=_UNLIMITED)) for address in addresses]
        self._call_numbers = itertools.count()

    def close(self) -> None:
        """Close the connections; waiting calls fail."""
        for _, channel in self._channels:
            channel.close()

    async def call(self, method: str, request: Any, answer: Callable[[bytes], Any]) -> Any:
        """Call a unary method and return ``answer(response bytes)``; cancellation cancels the call on the server.

        Raises Unreachable if no server is reachable, DeadlineExceeded, or the error of the server.
        """
        first = next(self._call_numbers)
        failures = []
        for turn in range(len(self._channels)):
            address, channel = self._channels[(first + turn) % len(self._channels)]
            span_attributes = {"rpc.system.name": "grpc", "rpc.method": method.lstrip("/"), "server.address": address}
            try:
                with child_span(f"call {method.lstrip('/')}", span_attributes, "client") as span:
                    headers = () if span is None else span.headers()
                    return await self._call_one(address, channel, method, request, answer, headers=headers)
            except Unreachable as failure:
                failures.append(failure.message)
        raise Unreachable("; ".join(failures))

    async def _call_one(
        self,
        address: str,
        channel: grpc.Channel,
        method: str,
        request: Any,
        answer: Callable[[bytes], Any],
        *,
        headers: Sequence[tuple[str, str]],
    ) -> Any:
        send = channel.unary_unary(
            method, request_serializer=type(request).SerializeToString, response_deserializer=answer
        )
        done, token = trio.Event(), trio.lowlevel.current_trio_token()
        future = send.future(request, timeout=self._timeout, metadata=headers)
        future.add_done_callback(lambda _: _set_from_thread(token, done))
        try:
            await done.wait()
            return future.result()
        except grpc.RpcError as failure:
            raise _error(address, failure, self._timeout) from None
        finally:
            future.cancel()


def _set_from_thread(token: trio.lowlevel.TrioToken, done: trio.Event) -> None:
    """Set the event from a gRPC thread, which may outlive the event loop."""
    try:
        token.run_sync_soon(done.set)
    except trio.RunFinishedError:
        return


def _error(address: str, failure: Any, timeout: float) -> ServerError:
    error = error_of_grpc(failure.code().name, failure.details())
    if isinstance(error, NotReady):
        return Unreachable(f"{address} is unreachable: {error.message}")
    if isinstance(error, DeadlineExceeded):
        return DeadlineExceeded(f"{address} did not answer within {timeout:g} s; set 'timeout' of the Op")
    return error


# Predictors

_METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"


class KServePredictor:
    """Predictor of a model on a KServe server; ``fetch`` is the default outputs, empty for all.

    Without ``config``, tensor names are the server's and arrays are sent unchanged.
    """

    def __init__(self, endpoints: Endpoints, model: str, config: ModelConfig | None, fetch: Sequence[str]) -> None:
        self._endpoints = endpoints
        self._model = model
        self._feeds = {} if config is None else {each.alias: each for each in config.feeds}
        self._fetches = {} if config is None else {each.alias: each for each in config.fetches}
        self._default = list(fetch)

    @property
    def feed_names(self) -> list[str]:
        """Input aliases; empty without a configuration."""
        return list(self._feeds)

    @property
    def fetch_names(self) -> list[str]:
        """Output aliases; empty without a configuration."""
        return list(self._fetches)

    async def predict(self, feed: Feed, fetch: Sequence[str] | None = None, *, batch: bool = True) -> dict[str, Array]:
        """Run the model, as :meth:`Predictor.predict`."""
        self.check(feed)
        requested = list(fetch or self._default or self._fetches)
        if self._fetches:
            check_fetch(requested, list(self._fetches))
        request = self._request(feed, requested, batch=batch)
        answer = await self._endpoints.call(_METHOD, request, message_class("inference.ModelInferResponse").FromString)
        with reading(self._model):
            return _outputs(answer, {self._remote(name): name for name in requested})

    def check(self, feed: Feed) -> None:
        """Raise FeedMismatch or FeedTypeError for an invalid feed."""
        if self._feeds:
            check_names(feed, self._feeds)
        check_types({name: value for name, value in feed.items() if not self._feeds or name in self._feeds})

    def close(self) -> None:
        """Close the connections; waiting calls fail."""
        self._endpoints.close()

    def _remote(self, alias: str) -> str:
        variable = self._fetches.get(alias)
        return alias if variable is None else variable.name

    def _request(self, feed: Feed, requested: Sequence[str], *, batch: bool) -> Any:
        request = message_class("inference.ModelInferRequest")(model_name=self._model)
        for alias, value in feed.items():
            variable = self._feeds.get(alias)
            if self._feeds and variable is None:
                continue  # row offsets exist only in Paddle's tensors
            array = _array(alias, value, variable)
            array = array if batch else array[np.newaxis]
            datatype = _datatype(alias, array)
            request.inputs.add(name=variable.name if variable else alias, datatype=datatype, shape=array.shape)
            request.raw_input_contents.append(to_raw(array, datatype))
        for alias in requested:
            request.outputs.add(name=self._remote(alias))
        return request


def _array(alias: str, value: Any, variable: Variable | None) -> Array:
    array = np.asarray(value, object) if isinstance(value, list) else value
    if variable is None or isinstance(value, list):
        return array
    try:
        return np.asarray(array, variable.dtype)
    except (TypeError, ValueError) as error:
        raise FeedTypeError(f"{alias!r} is {array.dtype} and cannot be cast to {variable.dtype}: {error}") from error


def _datatype(alias: str, array: Array) -> str:
    try:
        return datatype_of(array)
    except InvalidRequest as error:
        raise FeedTypeError(f"{alias!r}: {error.message}") from error


def _outputs(answer: Any, aliases: Mapping[str, str]) -> dict[str, Array]:
    pairs = zip(answer.outputs, answer.raw_output_contents, strict=True)
    outputs = {each.name: from_raw(raw, each.datatype, tuple(each.shape)) for each, raw in pairs}
    return {alias: outputs[name] for name, alias in aliases.items()} or outputs


class PipelinePredictor:
    """Predictor that calls another pipeline; ``packs_tensors`` sends arrays as tensors instead of numpy text."""

    feed_names: Sequence[str] = ()
    fetch_names: Sequence[str] = ()

    def __init__(self, endpoints: Endpoints, fetch: Sequence[str], *, packs_tensors: bool = False) -> None:
        self._endpoints = endpoints
        self._default = list(fetch)
        self.packs_tensors = packs_tensors

    async def predict(self, feed: Feed, fetch: Sequence[str] | None = None, *, batch: bool = True) -> dict[str, Any]:
        """Call the pipeline, as :meth:`Predictor.predict`; texts become lists of one string."""
        values = feed
        if not batch:
            values = {name: each[np.newaxis] if isinstance(each, np.ndarray) else each for name, each in feed.items()}
        request = REQUEST()
        (_add_tensors if self.packs_tensors else _add_texts)(request, values)
        answer = _read(await self._endpoints.call(METHOD, request, RESPONSE.FromString))
        names = fetch or self._default
        check_fetch(names, list(answer))
        return {name: answer[name] for name in names} if names else answer

    def check(self, feed: Feed) -> None:
        """Accept any feed: only the other pipeline knows its inputs."""

    def close(self) -> None:
        """Close the connections; waiting calls fail."""
        self._endpoints.close()


def _add_texts(request: Any, feed: Feed) -> None:
    with np.printoptions(threshold=sys.maxsize, legacy="1.25"):
        for name, value in feed.items():
            if not isinstance(value, str | list | np.ndarray):
                raise FeedTypeError(f"{name!r} is {type(value).__name__}: only str, list and numpy.ndarray can be sent")
            request.key.append(name)
            request.value.append(value if isinstance(value, str) else repr(value))


def _add_tensors(request: Any, feed: Feed) -> None:
    values = {name: [value] if isinstance(value, str) else value for name, value in feed.items()}
    check_types(values)
    for name, value in values.items():
        if name.endswith(LOD_SUFFIX) and name.removesuffix(LOD_SUFFIX) in values:
            continue
        try:
            add_tensor(request, from_array(name, value, values.get(name + LOD_SUFFIX)))
        except (TypeError, ValueError) as error:
            raise FeedTypeError(str(error)) from error


def _read(answer: Any) -> dict[str, Any]:
    if answer.err_no:
        raise ModelFailure(f"remote pipeline returned error {answer.err_no}: {answer.err_msg}")
    outputs: dict[str, Any] = {name: [value] for name, value in zip(answer.key, answer.value, strict=False)}
    for tensor in answer.tensors:
        try:
            outputs[tensor.name] = to_array(tensor_from_message(tensor))
        except ValueError as error:
            raise ModelFailure(f"remote pipeline returned an invalid tensor: {error}") from error
    return outputs
