"""Models of other servers that speak KServe v2 over gRPC, such as OpenVINO Model Server and Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.openvino.tensors import Array
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.protocol.status_errors import reading
from ovmstrio.protocol.wire_tensors import datatype_of, from_raw, to_raw
from ovmstrio.runtimes.ops.predictor.grpc_calls import Endpoints
from ovmstrio.runtimes.ops.predictor.model_config import ModelConfig, Variable, check_fetch, check_names, check_types
from ovmstrio.runtimes.ops.predictor.protocol import Feed, FeedTypeError

__all__ = ["KServePredictor"]

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
