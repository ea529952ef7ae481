"""Ops: the steps of a pipeline, which services subclass."""

# ruff: noqa: ARG002 - hooks name what they are given, whether the default uses it or not

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.isolation.user_code import is_async
from ovmstrio.ops.predictor.protocol import Prediction, Predictor
from ovmstrio.ops.tensors import pack, unpack
from ovmstrio.ops.values import ChannelData, CustomException, CustomExceptionCode, PipelineRequest

__all__ = ["EXECUTOR_NAME", "Op", "RequestOp", "ResponseOp"]

EXECUTOR_NAME: Final = "@DAGExecutor"
"""What the ends of a pipeline are called; the first Op finds its input under it."""

log = structlog.get_logger(__name__)
_numbers = itertools.count()


class Op:
    """One step of a pipeline.  Subclasses override hooks, each of which may be ``async def`` and then runs on the loop.

    An argument that is given goes before the same key of ``config.yml``.

    Args:
        name: what the Op is called in its pipeline and in ``config.yml``; made up if not given.
        input_ops: whose outputs it gets.
        server_endpoints: the servers that have its model; none if it runs the model itself.
        fetch_list: which outputs of the model it wants; all if not given.
        client_config: the description of a remote model.
        client_type: how the model is reached.
        concurrency: how many workers it has, each with a copy of the Op of its own.
        timeout: how many milliseconds one attempt of ``process`` may take; no limit if not positive.
        retry: how often ``process`` is attempted if it takes too long.
        batch_size: how many samples are processed together at most.
        auto_batching_timeout: how many milliseconds the first sample of a batch waits for others.
        local_service_handler: accepted for compatibility.
        jump_to_ops: whose place the Op's output may take, see :meth:`check_jumping`.

    Attributes:
        concurrency_idx: the number of the worker that the copy belongs to, None outside of workers.
        client: what runs the worker's model, if there is one.
        with_serving: whether there is a model.
        dynamic_shape_info: filled by :meth:`set_dynamic_shape_info`.
    """

    def __init__(  # noqa: PLR0917 - what services pass by position
        self,
        name: str | None = None,
        input_ops: Op | Sequence[Op] = (),
        server_endpoints: Sequence[str] | None = None,
        fetch_list: Sequence[str] | None = None,
        client_config: str | None = None,
        client_type: str | None = None,
        concurrency: int | None = None,
        timeout: int | None = None,
        retry: int = 0,
        batch_size: int | None = None,
        auto_batching_timeout: int | None = None,
        local_service_handler: Any = None,
        jump_to_ops: Op | Sequence[Op] = (),
    ) -> None:
        self.name = f"Op{next(_numbers)}" if name is None else name
        self.server_endpoints = server_endpoints
        self.fetch_list = fetch_list
        self._fetch_names = fetch_list
        self.client_config = client_config
        self.client_type = client_type
        self.concurrency = concurrency
        self.timeout = timeout
        self.retry = retry
        self.batch_size = batch_size
        self.auto_batching_timeout = auto_batching_timeout
        self.local_service_handler = local_service_handler
        self.concurrency_idx: int | None = None
        self.client: Predictor | None = None
        self.with_serving = False
        self.packs_tensors = False
        self.dynamic_shape_info: dict[str, Any] = {}
        self.set_input_ops(input_ops)
        self.set_jump_to_ops(jump_to_ops)
        self.set_dynamic_shape_info()

    # Hooks

    def set_dynamic_shape_info(self) -> None:
        """Fill ``dynamic_shape_info``; called by the constructor."""

    def init_op(self) -> Any:
        """Prepare a worker's copy, before its first sample; an exception ends the start of the server."""

    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        """Make the feed of one sample from the outputs of the input Ops, by their names.

        Returns:
            The feed, a dict or a list of dicts; or a tuple of the feed, whether the model is skipped, a product's error
            code or None, and its text.
        """
        (only,) = input_dicts.values()
        return only, False, None, ""

    def process(self, feed_batch: Sequence[Mapping[str, Any]], typical_logid: int = 0) -> Any:
        """Run the model with what several samples feed it; called in a thread if a subclass overrides it.

        Args:
            feed_batch: a list of one feed, in which the samples lie behind each other.
            typical_logid: the first sample's number.

        Returns:
            The model's outputs; or a tuple of them, an error code (0 for none) and its text.
        """
        return trio.from_thread.run(self.infer, feed_batch[0])

    def postprocess(self, input_dicts: Mapping[str, Any], fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Make the output of one sample from what the model gave, or from its feed if there was no model to run.

        Returns:
            The output, a dict; or a tuple of it, a product's error code or None, and its text.
        """
        return fetch_data if isinstance(fetch_data, dict) else {}, None, ""

    def check_jumping(self, postprocessed_batch: Mapping[int, ChannelData]) -> Any:
        """Tell whether a sample's output takes the place of that of the ``jump_to_ops``; asked for each sample."""
        return False

    # For hooks

    async def infer(self, feed: Mapping[str, Any]) -> Prediction:
        """Run the worker's model.

        Raises:
            CustomException: the Op has none.

        Ownership: the feed until it returns.

        Cancellation: as the predictor's.
        """
        if self.client is None:
            raise CustomException(CustomExceptionCode.NOT_IMPLEMENTED, f"{self.name} has no model to run", True)
        return await self.client.predict(feed, None if self._fetch_names is None else list(self._fetch_names))

    def _log(self, message: str) -> str:
        """Put the Op's name before a message."""
        return f"{self.name} {message}"

    # Settings that services make

    def set_input_ops(self, ops: Op | Sequence[Op]) -> None:
        """Set whose outputs the Op gets.

        Raises:
            ConfigError: they are not Ops.
        """
        self._input_ops = _ops(ops, self.name, "input_ops")

    def get_input_ops(self) -> list[Op]:
        """Give the Ops whose outputs the Op gets."""
        return list(self._input_ops)

    def set_jump_to_ops(self, ops: Op | Sequence[Op]) -> None:
        """Set whose place the Op's output may take.

        Raises:
            ConfigError: they are not Ops.
        """
        self._jump_to_ops = _ops(ops, self.name, "jump_to_ops")

    def get_jump_to_ops(self) -> list[Op]:
        """Give the Ops whose place the output may take."""
        return list(self._jump_to_ops)

    def set_pack_tensor_format(self, is_tensor_format: bool = False) -> None:  # noqa: FBT002 - the name's signature
        """Set whether another pipeline is sent tensors, and not text."""
        self.packs_tensors = is_tensor_format

    def init_from_dict(self, conf: Mapping[str, Any]) -> None:
        """Take the constructor's arguments from a mapping, where they are not set yet."""
        for key in ("concurrency", "timeout", "batch_size", "auto_batching_timeout", "client_type", "client_config"):
            if getattr(self, key) is None:
                setattr(self, key, conf.get(key))
        self.retry = self.retry or conf.get("retry", 0)
        self.server_endpoints = self.server_endpoints or conf.get("server_endpoints")
        if self.fetch_list is None:
            self.fetch_list = self._fetch_names = conf.get("fetch_list")


class RequestOp(Op):
    """The beginning of a pipeline: makes the first Op's input from a request.  A plain ``init_op`` runs at once."""

    def __init__(self) -> None:
        super().__init__(name=EXECUTOR_NAME)
        _init_now(self)

    def unpack_request_package(self, request: PipelineRequest) -> Any:
        """Make the first Op's input.

        Returns:
            The input, a dict; or a tuple of it, the client's number of the request, a product's error code or None, and
            its text.

        Raises:
            ValueError: the request cannot be read.
        """
        return unpack(request), request.logid, None, ""


class ResponseOp(Op):
    """The end of a pipeline: makes the answer from the last Op's output, or from an error.  See :class:`RequestOp`.

    Args:
        input_ops: the last Op.
    """

    def __init__(self, input_ops: Op | Sequence[Op]) -> None:
        super().__init__(name=EXECUTOR_NAME, input_ops=input_ops)
        self._is_packed_as_tensors = False
        _init_now(self)

    def set_pack_format(self, isTensor: bool = False) -> None:  # noqa: FBT002, N803 - the name's signature
        """Set whether arrays are answered as tensors, and not as text."""
        self._is_packed_as_tensors = isTensor

    def pack_response_package(self, channeldata: ChannelData) -> Any:
        """Make the answer: a :class:`PipelineResponse`, or whatever has fields of the message's names."""
        return pack(channeldata, as_tensors=self._is_packed_as_tensors)


def _init_now(op: Op) -> None:
    """Run ``init_op`` of an end of a pipeline, unless it has to wait for the loop."""
    if not is_async(op.init_op):
        op.init_op()


def _ops(ops: Op | Sequence[Op], name: str, what: str) -> tuple[Op, ...]:
    listed = (ops,) if isinstance(ops, Op) else tuple(ops)
    for one in listed:
        if not isinstance(one, Op):
            raise ConfigError([Problem(f"{what} of {name}", expected="Ops", found=type(one).__name__)])
    return listed
