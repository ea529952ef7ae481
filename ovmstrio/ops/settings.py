"""What can be configured of a pipeline: every key of ``config.yml`` with what it can be, and its default.

Times keep the unit that ``config.yml`` has for them; the properties that end in ``_seconds`` are what code waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from ovmstrio.config.documents import Located, did_you_mean
from ovmstrio.config.sections import Unusable, choice, flag, number, text, texts, whole

__all__ = [
    "ANY_PORT",
    "DagSettings",
    "LocalServiceConf",
    "LoggingSettings",
    "OpSettings",
    "PipelineSettings",
    "TracerSettings",
]

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
    """Take the name of a log level in any case."""
    found = _LEVELS.get(node.value.upper()) if isinstance(node.value, str) else None
    if found is None:
        raise Unusable(" or ".join(_LEVELS), did_you_mean(str(node.plain()).upper(), _LEVELS))
    return found


_Number = Annotated[int, whole()]
_FromZero = Annotated[int, whole(0)]
_Count = Annotated[int, whole(1)]
_Port = Annotated[int | None, whole(1024, 65_535, ANY_PORT)]
_Flag = Annotated[bool, flag]
_Text = Annotated[str, text]
_Given = Annotated[str | None, text]
_Texts = Annotated[tuple[str, ...] | None, texts]


def _seconds(milliseconds: float) -> float | None:
    """Give a time in seconds, None for one that is not limited."""
    return milliseconds / _MILLISECONDS if milliseconds > 0 else None


@dataclass(frozen=True, slots=True)
class TracerSettings:
    """How often the tracer writes its block; below 1 it is off."""

    interval_s: _Number = -1

    @property
    def enabled(self) -> bool:
        """Whether there is a tracer."""
        return self.interval_s >= 1


@dataclass(frozen=True, slots=True)
class LoggingSettings:
    """The log files.

    Attributes:
        level: the lowest level of ``pipeline.log``, as a number of the standard library.
        max_bytes: the size at which a file is put away; None keeps each file's own default.
        backups: how many files that were put away are kept; None keeps each file's own default.
        rate_limit: how many lines a second one place in the code may write; None for any number.
        enabled: whether files are written at all.
        folder: for a pipeline beside others, where its files are, with what concerns it alone; None where the
            environment says it.
    """

    level: Annotated[int, _level] = logging.INFO
    max_bytes: Annotated[int | None, whole(1)] = None
    backups: Annotated[int | None, whole(0)] = None
    rate_limit: Annotated[int | None, whole(1)] = None
    enabled: _Flag = True
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class DagSettings:
    """The block ``dag``.

    Attributes:
        is_thread_op: whether workers are threads; processes if not.
        retry: how often a request is tried in all when it comes to a timeout.
        use_profile: whether every request's timeline goes to standard error.
        channel_size: how many samples an edge holds at most; 0 for any number.
        channel_recv_frist_arrive: whether a join takes what arrives first and drops the rest of the same request.
        client_type: only logged.
        tracer: the tracer's own block.
        enable_prometheus: whether metrics are also served at a port of their own.
        prometheus_port: that port.
        max_queue: how many requests may wait for one of ``worker_num`` places; None for any number.
        request_timeout: how many milliseconds a request may take that came without a deadline; not above 0 for any.
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
    max_queue: Annotated[int | None, whole(0)] = None
    request_timeout: _Number = -1

    @property
    def request_timeout_seconds(self) -> float | None:
        """How long a request without a deadline may take."""
        return _seconds(self.request_timeout)


@dataclass(frozen=True, slots=True)
class LocalServiceConf:
    """The block ``local_service_conf`` of an Op; without ``model_config`` the Op has no model.

    ``fetch_list`` is None for all outputs.
    """

    model_config: _Given = None
    client_type: _Given = None
    fetch_list: _Texts = None
    workdir: _Text = ""
    thread_num: _Count = 2
    device_type: Annotated[int, whole(-1, 6)] = -1
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
        """The numbers of ``devices``, in order."""
        return tuple(part for part in (each.strip() for each in self.devices.split(",")) if part)


@dataclass(frozen=True, slots=True)
class OpSettings:
    """One Op's settings; those of ``op.<name>`` until its constructor's arguments are put over them.

    Attributes:
        name: the Op's name; empty for defaults that are nobody's yet.
        concurrency: how many workers it has.
        timeout: how many milliseconds one attempt of ``process`` may take; not above 0 for any.
        retry: how often ``process`` is tried in all when it comes to a timeout.
        batch_size: how many samples make a full batch.
        auto_batching_timeout: how many milliseconds a batch waits to be full; not above 0 for any.
        server_endpoints: where its model is served elsewhere; empty for a model of this process, or none.
        client_type: how the model is reached; None where nothing says it.
        client_config: the prototxt of a model that is served elsewhere, or its directory.
        fetch_list: the outputs that are wanted, by alias; None for all.
        use_encryption_model: whether the model elsewhere is encrypted.
        encryption_key: the file of its key.
        model_name: the model's name at a KServe endpoint; None for the Op's name.
        local_service_conf: the model of this process; of no effect with endpoints.
    """

    name: str = ""
    concurrency: _Count = 1
    timeout: _Number = -1
    retry: _Count = 1
    batch_size: _Count = 1
    auto_batching_timeout: _Number = -1
    server_endpoints: Annotated[tuple[str, ...], texts] = ()
    client_type: _Given = None
    client_config: _Given = None
    fetch_list: _Texts = None
    use_encryption_model: _Flag = False
    encryption_key: _Given = None
    model_name: _Given = None
    local_service_conf: LocalServiceConf = field(default_factory=LocalServiceConf)

    @property
    def timeout_seconds(self) -> float | None:
        """How long one attempt of ``process`` may take."""
        return _seconds(self.timeout)

    @property
    def batch_timeout_seconds(self) -> float | None:
        """How long a batch waits to be full."""
        return _seconds(self.auto_batching_timeout)

    @property
    def has_model(self) -> bool:
        """Whether there is a model, here or elsewhere; ``process`` is left out if not."""
        return bool(self.server_endpoints) or self.local_service_conf.model_config is not None


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """A whole ``config.yml``.

    Attributes:
        rpc_port: the port of gRPC, ``ANY_PORT`` for any; None where the file has none.
        http_port: the port of HTTP, likewise.
        worker_num: how many requests are worked on at once; with ``build_dag_each_worker``, how many processes there
            are.
        build_dag_each_worker: whether each of several processes serves by itself.
        http_status: whether HTTP answers of requests that failed have a status that says so, instead of 200.
        dag: the block ``dag``.
        ops: the block ``op``.
        logging: the block ``logging``.
        source: the file; None for settings that came as a dictionary.
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
        """Give an Op's settings, the defaults where the file has none."""
        return self.ops.get(name) or OpSettings(name)
