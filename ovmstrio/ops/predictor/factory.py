"""Creation of predictors for Op workers: shared local models, KServe servers or other pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import Array
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.crash_probe import CrashProbe
from ovmstrio.inference.network import Network
from ovmstrio.ops.predictor.kserve import Endpoints, KServePredictor, PipelinePredictor
from ovmstrio.ops.predictor.local_model import (
    LocalModel,
    count_workers,
    load_local_model,
    local_crash_probe,
    plugin_config,
    select_device,
)
from ovmstrio.ops.predictor.model_config import check_fetch, read_model_config
from ovmstrio.ops.predictor.protocol import Feed, FeedMismatch, Predictor
from ovmstrio.ops.settings import OpSettings


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
        wanted = model.wanted(fetch) if fetch else self._default
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
_TENSORRT: Final = 2


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
    if settings.local_service_conf.device_type == _TENSORRT:
        log.warning("TensorRT is not supported, OpenVINO's GPU plugin takes its place", op=settings.name)


def _unsupported(path: str, kind: str | None, expected: str, hint: str) -> Problem:
    message = "models cannot be reached in this way"
    return Problem(message, path=path, expected=expected, found=str(kind), suggestion=hint)
