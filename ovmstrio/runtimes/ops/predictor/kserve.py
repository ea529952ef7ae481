"""Models of other servers that speak KServe v2 over gRPC, such as OpenVINO Model Server and Triton."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ovmstrio.core.errors import InvalidRequest, ModelFailure
from ovmstrio.core.tensor import Array
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.protocol.pipeline_messages import METHOD, REQUEST, RESPONSE
from ovmstrio.protocol.status_errors import reading
from ovmstrio.protocol.wire_tensors import datatype_of, from_raw, to_raw
from ovmstrio.runtimes.ops.messages import add_tensor, tensor_from_message
from ovmstrio.runtimes.ops.predictor.grpc_calls import Endpoints
from ovmstrio.runtimes.ops.predictor.model_config import ModelConfig, Variable, check_fetch, check_names, check_types
from ovmstrio.runtimes.ops.predictor.protocol import Feed, FeedTypeError
from ovmstrio.runtimes.ops.tensors import LOD_SUFFIX, from_array, to_array

__all__ = ["KServePredictor", "PipelinePredictor"]

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
