"""``Op``: base class of Paddle Serving pipeline steps, with the hooks that user code overrides."""

# ruff: noqa: ARG002 - default hooks ignore some arguments

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.isolation.user_code import is_async
from ovmstrio.ops.messages import (
    ChannelData,
    CustomException,
    CustomExceptionCode,
    PipelineRequest,
    PipelineTensor,
    pack_response,
    unpack_request,
    unpack_tensor,
)
from ovmstrio.ops.predictor.protocol import ModelClient, Prediction

EXECUTOR_NAME: Final = "@DAGExecutor"
"""Name of RequestOp and ResponseOp; the first Op finds its input under it."""

log = structlog.get_logger(__name__)
_numbers = itertools.count()


class LocalServiceHandler:
    """Local model of an Op, for its argument ``local_service_handler``, or for clients that ``init_op`` creates.

    Arguments are keys of ``local_service_conf``, and ``fetch_names`` for its ``fetch_list``.  Arguments that have no
    effect on OpenVINO are accepted.  NotImplementedError for a ``client_type`` other than ``local_predictor``.

    Attributes:
        conf: the arguments as ``local_service_conf``.
    """

    def __init__(  # noqa: PLR0917 - services pass these by position
        self,
        model_config: str,
        client_type: str = "local_predictor",
        workdir: str = "",
        thread_num: int = 2,
        device_type: int = -1,
        devices: str = "",
        fetch_names: Sequence[str] | None = None,
        mem_optim: bool = True,  # noqa: FBT002 - as callers know it
        ir_optim: bool = False,  # noqa: FBT002 - as callers know it
        available_port_generator: Any = None,
        use_profile: bool = False,  # noqa: FBT002 - as callers know it
        precision: str = "fp32",
        **ignored: Any,
    ) -> None:
        if client_type != "local_predictor":
            raise NotImplementedError(
                f"LocalServiceHandler: expected client_type 'local_predictor', got {client_type!r}; "
                "for a remote model set server_endpoints and client_type: kserve"
            )
        self.conf: dict[str, Any] = {
            "model_config": str(model_config), "client_type": client_type, "thread_num": thread_num,
            "device_type": device_type, "devices": devices, "precision": precision,
        }  # fmt: skip
        if fetch_names is not None:
            self.conf["fetch_list"] = list(fetch_names)
        self._client: Any = None

    def get_client(self, concurrency_idx: int) -> Any:
        """Return the ``LocalPredictor`` of the model, loaded by the first call for the device of that worker."""
        from ovmstrio.ops.predictor.local_model import LocalPredictor  # noqa: PLC0415 - only this method needs OpenVINO

        if self._client is None:
            numbers = [each.strip() for each in self.conf["devices"].split(",") if each.strip()]
            kind = self.conf["device_type"]
            client = LocalPredictor()
            client.load_model_config(
                self.conf["model_config"],
                use_gpu=kind in {1, 2} or (kind == -1 and bool(numbers)),
                gpu_id=int(numbers[concurrency_idx % len(numbers)]) if numbers else 0,
                thread_num=self.conf["thread_num"],
                precision=self.conf["precision"],
            )
            self._client = client
        return self._client

    def get_fetch_list(self) -> list[str] | None:
        """Return the requested outputs; None for all."""
        return self.conf.get("fetch_list")

    def get_port_list(self) -> list[int]:
        """Return the ports of started servers: none."""
        return []

    def get_client_config(self) -> str:
        """Return the file that describes the model."""
        return str(Path(self.conf["model_config"]) / "serving_server_conf.prototxt")

    def prepare_server(self) -> None:
        """Do nothing; the model runs in the worker process."""

    def start_server(self) -> None:
        """Do nothing: the model runs in the process of its worker."""


class Op:
    """One step of a pipeline.  Subclasses override hooks; an ``async def`` hook runs on the event loop.

    Constructor arguments take precedence over ``config.yml``.

    Args:
        name: name in the pipeline and in ``config.yml``; generated if None.
        input_ops: Ops whose outputs are the inputs.
        server_endpoints: servers of a remote model; none for a local model.
        fetch_list: requested model outputs; default is all.
        client_config: description of a remote model.
        client_type: protocol of the model.
        concurrency: number of workers, each with a copy of the Op.
        timeout: milliseconds of one attempt of ``process``; no limit if not positive.
        retry: attempts of ``process`` on timeout.
        batch_size: maximum number of samples per batch.
        auto_batching_timeout: milliseconds that the first sample of a batch waits for others.
        local_service_handler: a :class:`LocalServiceHandler`, local model in place of ``local_service_conf``.
        jump_to_ops: Ops whose output this Op's output may replace, see :meth:`check_jumping`.

    Attributes:
        concurrency_idx: number of the worker that owns the copy, None outside of workers.
        client: client of the worker's model, a :class:`ModelClient`; None without a model.  ``init_op`` may set another
            one, such as a ``LocalPredictor``.
        with_serving: whether there is a model.
        dynamic_shape_info: filled by :meth:`set_dynamic_shape_info`.
    """

    def __init__(  # noqa: PLR0917 - services pass these by position
        self,
        name: str | None = None,
        input_ops: Op | Sequence[Op] | None = (),
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
        jump_to_ops: Op | Sequence[Op] | None = (),
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
        if not isinstance(local_service_handler, LocalServiceHandler | None):
            found = type(local_service_handler).__name__
            what = f"local_service_handler of {self.name}"
            raise ConfigError([Problem(what, expected="a LocalServiceHandler", found=found)])
        self.local_service_handler = local_service_handler
        self.concurrency_idx: int | None = None
        self.client: Any = None
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
        """Prepare a worker's copy before its first sample; an exception stops the server start."""

    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        """Return the feed of one sample from the outputs of the input Ops by name.

        Returns:
            The feed, a dict or a list of dicts; or a tuple of the feed, whether to skip the model, a product error code
            or None, and its text.
        """
        (only,) = input_dicts.values()
        return only, False, None, ""

    def process(self, feed_batch: Sequence[Mapping[str, Any]], typical_logid: int = 0) -> Any:
        """Run the model for merged samples in a thread; an overriding ``async`` method runs on the event loop.

        Args:
            feed_batch: a list of one feed, which holds the concatenated samples.
            typical_logid: data id of the first sample.

        Returns:
            The model's outputs; or a tuple of the outputs, an error code (0 for none) and its text.
        """
        return self._model_client().predict(
            feed=feed_batch[0], fetch=self._fetch_names, batch=True, log_id=typical_logid
        )

    def postprocess(self, input_dicts: Mapping[str, Any], fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Return the output of one sample from the model's outputs, or from its feed if the model did not run.

        Returns:
            The output, a dict; or a tuple of the output, a product error code or None, and its text.
        """
        return fetch_data if isinstance(fetch_data, dict) else {}, None, ""

    def check_jumping(self, postprocessed_batch: Mapping[int, ChannelData]) -> Any:
        """Return whether the output of a sample replaces the output of ``jump_to_ops``."""
        return False

    # Methods for hooks

    async def infer(self, feed: Mapping[str, Any]) -> Prediction:
        """Run the worker's model; raises CustomException if there is none."""
        client = self._model_client()
        if isinstance(client, ModelClient):
            return await client.predictor.predict(feed, self._fetch_names)
        predict = partial(client.predict, feed=feed, fetch=self._fetch_names, batch=True)
        prediction: Prediction = await trio.to_thread.run_sync(predict)
        return prediction

    def _model_client(self) -> Any:
        if self.client is None:
            raise CustomException(CustomExceptionCode.NOT_IMPLEMENTED, f"{self.name} has no model to run", True)
        return self.client

    def _log(self, message: str) -> str:
        return f"{self.name} {message}"

    # Settings

    def set_input_ops(self, ops: Op | Sequence[Op] | None) -> None:
        """Set the Ops whose outputs are the inputs; raises ConfigError for other objects."""
        self._input_ops = _check_ops(ops, self.name, "input_ops")

    def get_input_ops(self) -> list[Op]:
        """Return the input Ops."""
        return list(self._input_ops)

    def set_jump_to_ops(self, ops: Op | Sequence[Op] | None) -> None:
        """Set the Ops whose output this Op's output may replace; raises ConfigError for other objects."""
        self._jump_to_ops = _check_ops(ops, self.name, "jump_to_ops")

    def get_jump_to_ops(self) -> list[Op]:
        """Return the jump targets."""
        return list(self._jump_to_ops)

    def set_pack_tensor_format(self, is_tensor_format: bool = False) -> None:  # noqa: FBT002 - Paddle Serving's signature
        """Set whether a remote pipeline receives tensors instead of text."""
        self.packs_tensors = is_tensor_format

    def init_from_dict(self, conf: Mapping[str, Any]) -> None:
        """Fill unset constructor arguments from a mapping."""
        for key in ("concurrency", "timeout", "batch_size", "auto_batching_timeout", "client_type", "client_config"):
            if getattr(self, key) is None:
                setattr(self, key, conf.get(key))
        self.retry = self.retry or conf.get("retry", 0)
        self.server_endpoints = self.server_endpoints or conf.get("server_endpoints")
        if self.fetch_list is None:
            self.fetch_list = self._fetch_names = conf.get("fetch_list")


class RequestOp(Op):
    """Start of a pipeline: converts a request into the first Op's input.

    A synchronous ``init_op`` runs in the constructor.
    """

    def __init__(self) -> None:
        super().__init__(name=EXECUTOR_NAME)
        _init_if_sync(self)

    def unpack_request_package(self, request: PipelineRequest) -> Any:
        """Return the first Op's input.

        Returns:
            The input, a dict; or a tuple of the input, the client's log id, a product error code or None, and its text.

        Raises:
            ValueError: the request is malformed.
        """
        return unpack_request(request), request.logid, None, ""

    def proto_tensor_2_numpy(self, tensor: PipelineTensor) -> tuple[Any, Any]:
        """Return the array of a tensor of the request, a string for strings, and its row offsets or None.

        Raises:
            ValueError: the tensor is malformed or of unknown type.
        """
        return unpack_tensor(tensor)


class ResponseOp(Op):
    """End of a pipeline: converts the last Op's output or an error into the response.

    A synchronous ``init_op`` runs in the constructor.

    Args:
        input_ops: the last Op.
    """

    def __init__(self, input_ops: Op | Sequence[Op]) -> None:
        super().__init__(name=EXECUTOR_NAME, input_ops=input_ops)
        self._is_packed_as_tensors = False
        _init_if_sync(self)

    def set_pack_format(self, isTensor: bool = False) -> None:  # noqa: FBT002, N803 - Paddle Serving's signature
        """Set whether arrays are sent as tensors instead of text."""
        self._is_packed_as_tensors = isTensor

    def pack_response_package(self, channeldata: ChannelData) -> Any:
        """Return the response: a :class:`PipelineResponse`, or an object with the message's fields."""
        return pack_response(channeldata, as_tensors=self._is_packed_as_tensors)


def _init_if_sync(op: Op) -> None:
    if not is_async(op.init_op):
        op.init_op()


def _check_ops(ops: Op | Sequence[Op] | None, name: str, what: str) -> tuple[Op, ...]:
    listed = (ops,) if isinstance(ops, Op) else tuple(ops or ())
    for one in listed:
        if not isinstance(one, Op):
            raise ConfigError([Problem(f"{what} of {name}", expected="Ops", found=type(one).__name__)])
    return listed
