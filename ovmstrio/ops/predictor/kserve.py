"""Models of other servers that speak KServe v2 over gRPC, such as OpenVINO Model Server and Triton."""

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
from ovmstrio.core.tracing import part_of_call
from ovmstrio.encoding.messages import METHOD, REQUEST, RESPONSE, message_class
from ovmstrio.encoding.status_errors import Unreachable, error_of_grpc, reading
from ovmstrio.encoding.wire_tensors import datatype_of, from_raw, to_raw
from ovmstrio.ops.predictor.model_config import ModelConfig, Variable, check_fetch, check_names, check_types
from ovmstrio.ops.predictor.protocol import Feed, FeedTypeError
from ovmstrio.ops.tensors import LOD_SUFFIX, from_array, to_array
from ovmstrio.ops.values import add_tensor, tensor_from_message

__all__ = ["Endpoints", "KServePredictor", "PipelinePredictor"]

# ----------------------------------------------------------------------
# Calls of other servers over gRPC, awaited on the event loop and ended at once when nobody wants the answer
# ----------------------------------------------------------------------

_UNLIMITED: Final = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Endpoints:
    """Connections to servers that are each as good as the other; they take turns, and one that is gone is passed over.

    Args:
        addresses: ``host:port`` of each.
        timeout: the seconds that one call may take.
    """

    def __init__(self, addresses: Sequence[str], *, timeout: float) -> None:
        self._timeout = timeout
        self._channels = [(address, grpc.insecure_channel(address, options=_UNLIMITED)) for address in addresses]
        self._turns = itertools.count()

    def close(self) -> None:
        """Close the connections; calls that still wait fail."""
        for _, channel in self._channels:
            channel.close()

    async def call(self, method: str, request: Any, answer: Callable[[bytes], Any]) -> Any:
        """Call a unary method with a message and give what ``answer`` makes of the answer.

        Raises:
            Unreachable: no server could be reached.
            DeadlineExceeded: the server took too long.
            ServerError: what the server raised.

        Ownership: the message until it returns.

        Cancellation: at any time; the server is told.
        """
        first = next(self._turns)
        failures = []
        for turn in range(len(self._channels)):
            address, channel = self._channels[(first + turn) % len(self._channels)]
            told = {"rpc.system.name": "grpc", "rpc.method": method.lstrip("/"), "server.address": address}
            try:
                with part_of_call(f"call {method.lstrip('/')}", told, "client") as span:
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
        future.add_done_callback(lambda _: _tell(token, done))
        try:
            await done.wait()
            return future.result()
        except grpc.RpcError as failure:
            raise _error(address, failure, self._timeout) from None
        finally:
            future.cancel()


def _tell(token: trio.lowlevel.TrioToken, done: trio.Event) -> None:
    """Be called by a thread of the library, which may outlive the event loop."""
    try:
        token.run_sync_soon(done.set)
    except trio.RunFinishedError:
        return


def _error(address: str, failure: Any, timeout: float) -> ServerError:
    error = error_of_grpc(failure.code().name, failure.details())
    if isinstance(error, NotReady):
        return Unreachable(f"{address} cannot be used: {error.message}")
    if isinstance(error, DeadlineExceeded):
        return DeadlineExceeded(f"{address} did not answer within {timeout:g} s; 'timeout' of the Op sets how long")
    return error


# ----------------------------------------------------------------------
# Models of other servers that speak KServe v2 over gRPC, such as OpenVINO Model Server and Triton
# ----------------------------------------------------------------------

_METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"


class KServePredictor:
    """A model that is served elsewhere.

    Args:
        endpoints: where.
        model: its name there.
        config: its aliases and types; without it, names are those of the server, and arrays are sent as they are.
        fetch: what is fetched by default, of what ``config`` has; without names, everything.
    """

    def __init__(self, endpoints: Endpoints, model: str, config: ModelConfig | None, fetch: Sequence[str]) -> None:
        self._endpoints = endpoints
        self._model = model
        self._feeds = {} if config is None else {each.alias: each for each in config.feeds}
        self._fetches = {} if config is None else {each.alias: each for each in config.fetches}
        self._default = list(fetch)

    @property
    def feed_names(self) -> list[str]:
        """The aliases of what the model takes; none without its description."""
        return list(self._feeds)

    @property
    def fetch_names(self) -> list[str]:
        """The aliases of what the model gives; none without its description."""
        return list(self._fetches)

    async def predict(self, feed: Feed, fetch: Sequence[str] | None = None, *, batch: bool = True) -> dict[str, Array]:
        """Infer; without names in ``fetch`` gives what the Op is configured to fetch.

        Raises:
            FeedMismatch: names are not those of the description.
            FeedTypeError: a value is neither an array nor a list of ``str``, or of no type that can be sent.
            ServerError: the other server refused or did not answer; the class tells which.

        Ownership: the feed's values must stay unchanged until it returns; the answer is the caller's.

        Cancellation: at any time; the other server is told.
        """
        self.check(feed)
        wanted = list(fetch or self._default or self._fetches)
        if self._fetches:
            check_fetch(wanted, list(self._fetches))
        request = self._request(feed, wanted, batch=batch)
        answer = await self._endpoints.call(_METHOD, request, message_class("inference.ModelInferResponse").FromString)
        with reading(self._model):
            return _outputs(answer, {self._remote(name): name for name in wanted})

    def check(self, feed: Feed) -> None:
        """Refuse a feed that can never be inferred on.

        Raises:
            FeedMismatch: names are not those of the description.
            FeedTypeError: a value is neither an array nor a list of ``str``.
        """
        if self._feeds:
            check_names(feed, self._feeds)
        check_types({name: value for name, value in feed.items() if not self._feeds or name in self._feeds})

    def close(self) -> None:
        """Close the connections; calls that still wait fail."""
        self._endpoints.close()

    def _remote(self, alias: str) -> str:
        variable = self._fetches.get(alias)
        return alias if variable is None else variable.name

    def _request(self, feed: Feed, wanted: Sequence[str], *, batch: bool) -> Any:
        request = message_class("inference.ModelInferRequest")(model_name=self._model)
        for alias, value in feed.items():
            variable = self._feeds.get(alias)
            if self._feeds and variable is None:
                continue  # row offsets, which only Paddle's own tensors have
            array = _array(alias, value, variable)
            array = array if batch else array[np.newaxis]
            datatype = _datatype(alias, array)
            request.inputs.add(name=variable.name if variable else alias, datatype=datatype, shape=array.shape)
            request.raw_input_contents.append(to_raw(array, datatype))
        for alias in wanted:
            request.outputs.add(name=self._remote(alias))
        return request


def _array(alias: str, value: Any, variable: Variable | None) -> Array:
    array = np.asarray(value, object) if isinstance(value, list) else value
    if variable is None or isinstance(value, list):
        return array
    try:
        return np.asarray(array, variable.dtype)
    except (TypeError, ValueError) as error:
        raise FeedTypeError(f"{alias!r} is {array.dtype} and cannot be made {variable.dtype}: {error}") from error


def _datatype(alias: str, array: Array) -> str:
    try:
        return datatype_of(array)
    except InvalidRequest as error:
        raise FeedTypeError(f"{alias!r}: {error.message}") from error


def _outputs(answer: Any, aliases: Mapping[str, str]) -> dict[str, Array]:
    pairs = zip(answer.outputs, answer.raw_output_contents, strict=True)
    found = {each.name: from_raw(raw, each.datatype, tuple(each.shape)) for each, raw in pairs}
    return {alias: found[name] for name, alias in aliases.items()} or found


class PipelinePredictor:
    """Another pipeline.

    Args:
        endpoints: where it is served.
        fetch: what is fetched by default; without names, everything.
        packs_tensors: whether arrays are sent as tensors, and not as numpy prints them.
    """

    feed_names: Sequence[str] = ()
    fetch_names: Sequence[str] = ()

    def __init__(self, endpoints: Endpoints, fetch: Sequence[str], *, packs_tensors: bool = False) -> None:
        self._endpoints = endpoints
        self._default = list(fetch)
        self.packs_tensors = packs_tensors

    async def predict(self, feed: Feed, fetch: Sequence[str] | None = None, *, batch: bool = True) -> dict[str, Any]:
        """Ask the pipeline; a text of its answer is given as a list of that one text, a tensor as an array.

        Raises:
            FeedTypeError: a value can not be sent.
            FeedMismatch: the answer has not what is to be fetched.
            ModelFailure: the pipeline answered with an error.
            ServerError: the other server refused or did not answer; the class tells which.

        Ownership: the feed's values must stay unchanged until it returns; the answer is the caller's.

        Cancellation: at any time; the other server is told.
        """
        values = feed if batch else {name: _batched(value) for name, value in feed.items()}
        request = REQUEST()
        (_add_tensors if self.packs_tensors else _add_texts)(request, values)
        answer = _read(await self._endpoints.call(METHOD, request, RESPONSE.FromString))
        names = fetch or self._default
        check_fetch(names, list(answer))
        return {name: answer[name] for name in names} if names else answer

    def check(self, feed: Feed) -> None:
        """Refuse nothing: the other pipeline alone knows what it takes."""

    def close(self) -> None:
        """Close the connections; calls that still wait fail."""
        self._endpoints.close()


def _batched(value: Any) -> Any:
    return value[np.newaxis] if isinstance(value, np.ndarray) else value


def _add_texts(request: Any, feed: Feed) -> None:
    with np.printoptions(threshold=sys.maxsize, legacy="1.25"):
        for name, value in feed.items():
            if not isinstance(value, str | list | np.ndarray):
                raise FeedTypeError(f"{name!r} is {type(value).__name__}: only str, list and numpy.ndarray can be sent")
            request.key.append(name)
            request.value.append(value if isinstance(value, str) else repr(value))


def _add_tensors(request: Any, feed: Feed) -> None:
    whole = {name: [value] if isinstance(value, str) else value for name, value in feed.items()}
    check_types(whole)
    for name, value in whole.items():
        if name.endswith(LOD_SUFFIX) and name.removesuffix(LOD_SUFFIX) in whole:
            continue
        try:
            add_tensor(request, from_array(name, value, whole.get(name + LOD_SUFFIX)))
        except (TypeError, ValueError) as error:
            raise FeedTypeError(str(error)) from error


def _read(answer: Any) -> dict[str, Any]:
    if answer.err_no:
        raise ModelFailure(f"the other pipeline answered with error {answer.err_no}: {answer.err_msg}")
    found: dict[str, Any] = {name: [value] for name, value in zip(answer.key, answer.value, strict=False)}
    for tensor in answer.tensors:
        try:
            found[tensor.name] = to_array(tensor_from_message(tensor))
        except ValueError as error:
            raise ModelFailure(f"the other pipeline's answer cannot be read: {error}") from error
    return found
