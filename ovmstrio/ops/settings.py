"""Settings of an Op pipeline: every key of ``config.yml`` with its type and default.

Fields keep the units of ``config.yml``; properties ending in ``_seconds`` convert them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from ovmstrio.config.documents import did_you_mean
from ovmstrio.config.located import Located
from ovmstrio.config.yaml_rules import InvalidValue, boolean, choice, integer, number, string_list, string_value

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


_Number = Annotated[int, integer()]
_FromZero = Annotated[int, integer(0)]
_Count = Annotated[int, integer(1)]
_Port = Annotated[int | None, integer(1024, 65_535, ANY_PORT)]
_Flag = Annotated[bool, boolean]
_Text = Annotated[str, string_value]
_OptionalText = Annotated[str | None, string_value]
_Texts = Annotated[tuple[str, ...] | None, string_list]


def _seconds(milliseconds: float) -> float | None:
    return milliseconds / _MILLISECONDS if milliseconds > 0 else None


@dataclass(frozen=True, slots=True)
class TracerSettings:
    """Block ``tracer``; an interval below 1 disables the tracer."""

    interval_s: _Number = -1

    @property
    def enabled(self) -> bool:
        """Whether the tracer runs."""
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

    level: Annotated[int, _level] = logging.INFO
    max_bytes: Annotated[int | None, integer(1)] = None
    backups: Annotated[int | None, integer(0)] = None
    rate_limit: Annotated[int | None, integer(1)] = None
    enabled: _Flag = True
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class DagSettings:
    """Block ``dag``.

    Attributes:
        is_thread_op: run workers in threads, otherwise in processes.
        retry: attempts of a request on timeout.
        use_profile: write every request's timeline to standard error.
        channel_size: most samples in a channel; 0 for no limit.
        channel_recv_frist_arrive: run a join with its first input and drop the other inputs of the request.
        client_type: only logged.
        tracer: tracer settings.
        enable_prometheus: serve metrics also on ``prometheus_port``.
        prometheus_port: metrics port.
        max_queue: most requests waiting for one of ``worker_num`` places; None for no limit.
        request_timeout: milliseconds of a request without a deadline; no limit if not positive.
    """

    is_thread_op: _Flag = True
    retry: _Count = 1
    use_profile: _Flag = False
    channel_size: _FromZero = 0
    channel_recv_frist_arrive: _Flag = False
    client_type: Annotated[str, choice(("brpc", "grpc", "local_predictor"))] = "brpc"
    tracer: TracerSettings = field(default_factory=TracerSettings)
    enable_prometheus: _Flag = False
    prometheus_port: _Port = None
    max_queue: Annotated[int | None, integer(0)] = None
    request_timeout: _Number = -1

    @property
    def request_timeout_seconds(self) -> float | None:
        """Time limit of a request without a deadline, or None."""
        return _seconds(self.request_timeout)


@dataclass(frozen=True, slots=True)
class LocalServiceConf:
    """Block ``local_service_conf`` of an Op; without ``model_config`` the Op has no local model.

    ``fetch_list`` None means all outputs.
    """

    model_config: _OptionalText = None
    client_type: _OptionalText = None
    fetch_list: _Texts = None
    workdir: _Text = ""
    thread_num: _Count = 2
    device_type: Annotated[int, integer(-1, 6)] = -1
    devices: _Text = ""
    mem_optim: _Flag = True
    ir_optim: _Flag = False
    use_mkldnn: _Flag = False
    mkldnn_cache_capacity: _FromZero = 0
    mkldnn_op_list: _Texts = None
    mkldnn_bf16_op_list: _Texts = None
    precision: _Text = "fp32"
    use_calib: _Flag = False
    min_subgraph_size: _Number = 3
    reload_interval_s: Annotated[float | None, number(0)] = None

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

    name: str = ""
    concurrency: _Count = 1
    timeout: _Number = -1
    retry: _Count = 1
    batch_size: _Count = 1
    auto_batching_timeout: _Number = -1
    server_endpoints: Annotated[tuple[str, ...], string_list] = ()
    client_type: _OptionalText = None
    client_config: _OptionalText = None
    fetch_list: _Texts = None
    use_encryption_model: _Flag = False
    encryption_key: _OptionalText = None
    model_name: _OptionalText = None
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
        """Whether there is a local or remote model."""
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
    """

    rpc_port: _Port = None
    http_port: _Port = None
    worker_num: _Count = 1
    build_dag_each_worker: _Flag = False
    http_status: _Flag = False
    dag: DagSettings = field(default_factory=DagSettings)
    ops: Mapping[str, OpSettings] = field(default_factory=dict)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    source: Path | None = None

    def op(self, name: str) -> OpSettings:
        """Return the settings of an Op, or defaults."""
        return self.ops.get(name) or OpSettings(name)
