"""Predictors of Op workers: shared local models, models of KServe servers, and other pipelines."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
import structlog
import trio

from ovmstrio.core.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    ModelFailure,
    NotReady,
    Problem,
    ServerError,
)
from ovmstrio.core.tensor import Array
from ovmstrio.core.tracing import child_span
from ovmstrio.encoding.messages import METHOD, REQUEST, RESPONSE, message_class
from ovmstrio.encoding.raw_contents import datatype_of, from_raw, to_raw
from ovmstrio.encoding.status_errors import Unreachable, error_of_grpc, reading
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.crash_probe import CrashProbe
from ovmstrio.inference.network import Network
from ovmstrio.ops.messages import LOD_SUFFIX, add_tensor, from_array, tensor_from_message, to_array
from ovmstrio.ops.predictor.local_model import (
    TENSORRT,
    TENSORRT_REPLACED,
    LocalModel,
    count_workers,
    load_local_model,
    local_crash_probe,
    plugin_config,
    select_device,
)
from ovmstrio.ops.predictor.model_config import (
    ModelConfig,
    Variable,
    check_fetch,
    check_names,
    check_types,
    read_model_config,
)
from ovmstrio.ops.predictor.protocol import Feed, FeedMismatch, FeedTypeError, Predictor
from ovmstrio.ops.settings import OpSettings
from ovmstrio.util.extras import Extra, missing_extra

# ----------------------------------------------------------------------
# Predictors for models on other servers: KServe v2 over gRPC, and Paddle Serving pipelines
# ----------------------------------------------------------------------

# gRPC calls

_UNLIMITED: Final = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Endpoints:
    """Connections to equivalent servers at ``host:port``, used round-robin; unreachable servers are skipped."""

    def __init__(self, addresses: Sequence[str], *, timeout: float) -> None:
        import grpc  # noqa: PLC0415 - optional

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
        channel: Any,
        method: str,
        request: Any,
        answer: Callable[[bytes], Any],
        *,
        headers: Sequence[tuple[str, str]],
    ) -> Any:
        import grpc  # noqa: PLC0415 - optional

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
            datatype, raw = _encode(alias, array)
            request.inputs.add(name=variable.name if variable else alias, datatype=datatype, shape=array.shape)
            request.raw_input_contents.append(raw)
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


def _encode(alias: str, array: Array) -> tuple[str, bytes]:
    """Return the datatype of an array and its raw contents."""
    try:
        datatype = datatype_of(array)
        return datatype, to_raw(array, datatype)
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


# ----------------------------------------------------------------------
# Creation of predictors for Op workers: shared local models, KServe servers or other pipelines
# ----------------------------------------------------------------------


class SharedModel:
    """Compiled model and its infer requests, shared by all workers on a device."""

    def __init__(self, model: LocalModel, compiled: Compiled) -> None:
        self.model = model
        self.network = Network(compiled)


class WorkerPredictor:
    """Predictor of one worker over a shared local model; FeedMismatch for unknown default outputs ``fetch``."""

    def __init__(self, shared: SharedModel, fetch: Sequence[str]) -> None:
        self._shared = shared
        self._default = shared.model.wanted(fetch)
        self._default_names = [variable.alias for variable in self._default]

    @property
    def feed_names(self) -> list[str]:
        """Input aliases."""
        return self._shared.model.feed_names

    @property
    def fetch_names(self) -> list[str]:
        """Output aliases."""
        return self._shared.model.fetch_names

    async def predict(self, feed: Feed, fetch: Sequence[str] | None = None, *, batch: bool = True) -> dict[str, Array]:
        """Run the model, as :meth:`Predictor.predict`."""
        model = self._shared.model
        wanted = model.wanted(fetch) if fetch and [*fetch] != self._default_names else self._default
        outputs = await self._shared.network.infer(model.arrays(feed, batch=batch))
        return model.answer(outputs, wanted)

    def check(self, feed: Feed) -> None:
        """Raise FeedMismatch or FeedTypeError for an invalid feed."""
        self._shared.model.check(feed)

    def close(self) -> None:
        """Do nothing: the last reference releases the model."""


log = structlog.get_logger(__name__)

_TIMEOUT_SECONDS: Final = 60.0
"""Time limit of a remote call for an Op without a timeout."""
_KSERVE: Final = frozenset({"kserve", "grpc"})
_PIPELINE: Final = "pipeline_grpc"
_LOCAL: Final = "local_predictor"
_REMOTE_KINDS: Final = "kserve (or grpc) for OpenVINO Model Server, Triton and other KServe servers, or pipeline_grpc"


class PredictorFactory:
    """Factory of predictors for the workers of one process; ``is_thread_op`` if it holds all workers of an Op.

    Workers with equal settings and device share one model while any of them is open. ``probe`` runs unknown models
    first.
    """

    def __init__(self, *, is_thread_op: bool, probe: CrashProbe | None = None) -> None:
        self._is_thread_op = is_thread_op
        self._probe = probe
        self._loading = trio.Lock()
        self._shared: WeakValueDictionary[tuple[OpSettings, str], SharedModel] = WeakValueDictionary()

    async def __call__(self, settings: OpSettings, worker: int) -> Predictor:
        """Create the predictor of a worker; the caller must close it.  A model being loaded ignores cancellation.

        Raises ConfigError if the model cannot be loaded, or with all unsupported settings.
        """
        _check_supported(settings)
        return _remote(settings) if settings.server_endpoints else await self._local(settings, worker)

    async def _local(self, settings: OpSettings, worker: int) -> WorkerPredictor:
        conf = settings.local_service_conf
        device = select_device(conf, worker)
        async with self._loading:
            shared = self._shared.get((settings, device))
            if shared is None:
                workers = count_workers(device, conf, settings.concurrency) if self._is_thread_op else 1
                config = plugin_config(conf, device, workers)
                folder = Path(conf.model_config or "")
                if self._probe is not None:
                    await self._probe.try_model(local_crash_probe(folder, device, config))
                loaded = await trio.to_thread.run_sync(load_local_model, folder, device, config)
                shared = self._shared[settings, device] = SharedModel(*loaded)
                log.info("model loaded", op=settings.name, model=str(folder), device=device, **config)
        with _fetch_list_of(settings):
            return WorkerPredictor(shared, conf.fetch_list or ())


def _remote(settings: OpSettings) -> Predictor:
    if missing := missing_extra("grpc", Extra.GRPC):
        message = f"Op {settings.name!r} calls another server, which needs grpcio"
        raise ConfigError([Problem(message, suggestion=missing)])
    fetch = settings.fetch_list or ()
    config = None
    if settings.client_config is not None and settings.client_type != _PIPELINE:
        config = read_model_config(Path(settings.client_config))
        with _fetch_list_of(settings):
            check_fetch(fetch, [variable.alias for variable in config.fetches])
    endpoints = Endpoints(settings.server_endpoints, timeout=settings.timeout_seconds or _TIMEOUT_SECONDS)
    if settings.client_type == _PIPELINE:
        return PipelinePredictor(endpoints, fetch)
    return KServePredictor(endpoints, settings.model_name or settings.name, config, fetch)


@contextmanager
def _fetch_list_of(settings: OpSettings) -> Iterator[None]:
    try:
        yield
    except FeedMismatch as error:
        raise ConfigError([Problem(error.message, path=f"op.{settings.name}.fetch_list")]) from error


def _check_supported(settings: OpSettings) -> None:
    prefix = f"op.{settings.name}."
    problems: list[Problem] = []
    if settings.use_encryption_model:
        message, hint = "encrypted models are not supported", "decrypt the model and serve it without encryption"
        problems.append(Problem(message, path=f"{prefix}use_encryption_model", suggestion=hint))
    kind = settings.client_type
    if settings.server_endpoints:
        if kind not in {*_KSERVE, _PIPELINE}:
            hint = "serve the model with OpenVINO Model Server or 'ovms serve', and write client_type: kserve"
            problems.append(_unsupported(f"{prefix}client_type", kind, _REMOTE_KINDS, hint))
    elif settings.local_service_conf.model_config is not None:
        kind = settings.local_service_conf.client_type or _LOCAL
        if kind != _LOCAL:
            hint = f"write client_type: {_LOCAL}, and the model runs in this process"
            problems.append(_unsupported(f"{prefix}local_service_conf.client_type", kind, _LOCAL, hint))
    if problems:
        raise ConfigError(problems)
    if settings.local_service_conf.device_type == TENSORRT:
        log.warning(TENSORRT_REPLACED, op=settings.name)


def _unsupported(path: str, kind: str | None, expected: str, hint: str) -> Problem:
    message = "models cannot be reached in this way"
    return Problem(message, path=path, expected=expected, found=str(kind), suggestion=hint)
