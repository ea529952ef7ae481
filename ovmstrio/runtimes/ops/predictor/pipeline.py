"""Pipelines of other servers: what an Op feeds becomes a request of theirs, and its answer what the Op fetches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ovmstrio.core.errors import ModelFailure
from ovmstrio.protocol.pipeline_messages import METHOD, REQUEST, RESPONSE
from ovmstrio.runtimes.ops.messages import add_tensor, tensor_from_message
from ovmstrio.runtimes.ops.predictor.grpc_calls import Endpoints
from ovmstrio.runtimes.ops.predictor.model_config import check_fetch, check_types
from ovmstrio.runtimes.ops.predictor.protocol import Feed, FeedTypeError
from ovmstrio.runtimes.ops.tensors import LOD_SUFFIX, from_array, to_array

__all__ = ["PipelinePredictor"]


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
