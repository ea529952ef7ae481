"""Settings of an Op pipeline: every key of ``config.yml`` with its type and default.

Fields keep the units of ``config.yml``; properties ending in ``_seconds`` convert them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from ovmstrio.config.documents import InvalidValue, Located, did_you_mean
from ovmstrio.config.schema import Key, NoEffect, ReadBy

ANY_PORT: Final = 0
_MILLISECONDS: Final = 1000.0
_LEVELS: Final = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
}


def _level(node: Located) -> int:
    level = _LEVELS.get(node.value.upper()) if isinstance(node.value, str) else None
    if level is None:
        raise InvalidValue(" or ".join(_LEVELS), did_you_mean(str(node.plain()).upper(), _LEVELS))
    return level


_FromZero = Annotated[int, Field(ge=0)]
_Count = Annotated[int, Field(ge=1)]
_Port = Annotated[int, Field(ge=1024, le=65_535)] | Literal[0] | None


def _seconds(milliseconds: float) -> float | None:
    return milliseconds / _MILLISECONDS if milliseconds > 0 else None


@dataclass(frozen=True, slots=True)
class TracerSettings:
    """Block ``tracer``; an interval below 1 disables the tracer."""

    interval_s: int = -1

    @property
    def enabled(self) -> bool:
        """True if the tracer runs."""
        return self.interval_s >= 1


@dataclass(frozen=True, slots=True)
class LoggingSettings:
    """Block ``logging``: the log files.

    Attributes:
        level: lowest level of ``pipeline.log``, a number of the ``logging`` module.
        max_bytes: size at which a file is rotated; None for the default of the file.
        backups: rotated files to keep; None for the default of the file.
        rate_limit: lines per second and call site; None for no limit.
        enabled: whether log files are written.
        folder: parent of the log directory for one pipeline among others; None to use the environment.
    """

    level: Annotated[int, ReadBy(_level)] = logging.INFO
    max_bytes: _Count | None = None
    backups: _FromZero | None = None
    rate_limit: _Count | None = None
    enabled: bool = True
    folder: Annotated[Path | None, Key()] = None


@dataclass(frozen=True, slots=True)
class DagSettings:
    """Block ``dag``.

    Attributes:
        is_thread_op: run workers in threads, otherwise in processes.
        retry: attempts of a request on timeout.
        use_profile: write every request's timeline to standard error.
        channel_size: maximum number of samples in a channel; 0 for no limit.
        channel_recv_frist_arrive: run a join with its first input and drop the other inputs of the request.
        client_type: only logged.
        tracer: tracer settings.
        enable_prometheus: serve metrics also on ``prometheus_port``.
        prometheus_port: metrics port.
        max_queue: maximum number of requests that wait for one of ``worker_num`` places; None for no limit.
        request_timeout: milliseconds of a request without a deadline; no limit if not positive.
    """

    is_thread_op: bool = True
    retry: _Count = 1
    use_profile: bool = False
    channel_size: _FromZero = 0
    channel_recv_frist_arrive: Annotated[bool, Key("channel_recv_frist_arrive", "channel_recv_first_arrive")] = False
    client_type: Annotated[Literal["brpc", "grpc", "local_predictor"], NoEffect("client_type is set per Op")] = "brpc"
    tracer: TracerSettings = field(default_factory=TracerSettings)
    enable_prometheus: bool = False
    prometheus_port: _Port = None
    max_queue: _FromZero | None = None
    request_timeout: int = -1

    @property
    def request_timeout_seconds(self) -> float | None:
        """Time limit of a request without a deadline, or None."""
        return _seconds(self.request_timeout)


@dataclass(frozen=True, slots=True)
class LocalServiceConf:
    """Block ``local_service_conf`` of an Op; without ``model_config`` the Op has no local model.

    ``fetch_list`` None means all outputs.
    """

    model_config: str | None = None
    client_type: str | None = None
    fetch_list: tuple[str, ...] | None = None
    workdir: Annotated[str, NoEffect("no server is started for the model")] = ""
    thread_num: _Count = 2
    device_type: Annotated[int, Field(ge=-1, le=6)] = -1
    devices: str = ""
    mem_optim: Annotated[bool, NoEffect("OpenVINO always reuses memory")] = True
    ir_optim: Annotated[bool, NoEffect("OpenVINO always optimises")] = False
    use_mkldnn: Annotated[bool, NoEffect("OpenVINO runs on oneDNN")] = False
    mkldnn_cache_capacity: Annotated[_FromZero, NoEffect("OpenVINO manages its cache")] = 0
    mkldnn_op_list: Annotated[tuple[str, ...] | None, NoEffect("OpenVINO selects the operators")] = None
    mkldnn_bf16_op_list: Annotated[tuple[str, ...] | None, NoEffect("`precision` applies to all operators")] = None
    precision: str = "fp32"
    use_calib: Annotated[bool, NoEffect("TensorRT only")] = False
    min_subgraph_size: Annotated[int, NoEffect("TensorRT only")] = 3
    reload_interval_s: Annotated[
        Annotated[float, Field(gt=0)] | None, NoEffect("models are read once at server start")
    ] = None

    @property
    def device_ids(self) -> tuple[str, ...]:
        """Device numbers in ``devices``, in order."""
        return tuple(part for part in (each.strip() for each in self.devices.split(",")) if part)


@dataclass(frozen=True, slots=True)
class OpSettings:
    """Settings of one Op: block ``op.<name>`` and constructor arguments.

    Attributes:
        name: name of the Op; empty for defaults.
        concurrency: number of workers.
        timeout: milliseconds of one attempt of ``process``; no limit if not positive.
        retry: attempts of ``process`` on timeout.
        batch_size: samples of a full batch.
        auto_batching_timeout: milliseconds that a batch waits to fill; no limit if not positive.
        server_endpoints: addresses of a remote model; empty for a local model or none.
        client_type: protocol of the model; None if not set.
        client_config: prototxt of a remote model, or its directory.
        fetch_list: aliases of the requested outputs; None for all.
        use_encryption_model: whether the remote model is encrypted.
        encryption_key: key file.
        model_name: model name at a KServe endpoint; None for the Op's name.
        local_service_conf: local model; without effect if there are endpoints.
    """

    name: Annotated[str, Key()] = ""
    concurrency: _Count = 1
    timeout: int = -1
    retry: _Count = 1
    batch_size: _Count = 1
    auto_batching_timeout: int = -1
    server_endpoints: tuple[str, ...] = ()
    client_type: str | None = None
    client_config: str | None = None
    fetch_list: tuple[str, ...] | None = None
    use_encryption_model: bool = False
    encryption_key: str | None = None
    model_name: str | None = None
    local_service_conf: LocalServiceConf = field(default_factory=LocalServiceConf)

    @property
    def timeout_seconds(self) -> float | None:
        """Time limit of one attempt of ``process``, or None."""
        return _seconds(self.timeout)

    @property
    def batch_timeout_seconds(self) -> float | None:
        """Time that a batch waits to fill, or None for no limit."""
        return _seconds(self.auto_batching_timeout)

    @property
    def has_model(self) -> bool:
        """True if there is a local or remote model."""
        return bool(self.server_endpoints) or self.local_service_conf.model_config is not None


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """Content of ``config.yml``.

    Attributes:
        rpc_port: gRPC port, ``ANY_PORT`` for any free one; None if not set.
        http_port: HTTP port, likewise.
        worker_num: requests processed at the same time.
        build_dag_each_worker: accepted without effect.
        http_status: send HTTP error statuses for failed requests, instead of 200.
        dag: block ``dag``.
        ops: block ``op``.
        logging: block ``logging``.
        source: the file; None for a dictionary.
        grpc_gateway_port: accepted without effect.
    """

    rpc_port: _Port = None
    http_port: _Port = None
    worker_num: _Count = 1
    build_dag_each_worker: Annotated[
        bool, NoEffect("one process serves; `is_thread_op: false` runs Ops in worker processes")
    ] = False
    http_status: bool = False
    dag: DagSettings = field(default_factory=DagSettings)
    ops: Annotated[Mapping[str, OpSettings], Key("op")] = field(default_factory=dict)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    source: Annotated[Path | None, Key()] = None
    grpc_gateway_port: Annotated[int | None, NoEffect("HTTP is served without a gateway")] = None

    def op(self, name: str) -> OpSettings:
        """Return the settings of an Op, or defaults."""
        return self.ops.get(name) or OpSettings(name)
