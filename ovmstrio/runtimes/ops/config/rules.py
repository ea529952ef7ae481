"""Every key of ``config.yml``, with what it can be; defaults are those of the settings.

Keys that are taken but have no effect on OpenVINO are in :data:`WITHOUT_EFFECT`, by block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ovmstrio.runtimes.ops.config.op_settings import ANY_PORT
from ovmstrio.runtimes.ops.config.values import Value, choice, flag, level, number, text, texts, whole

__all__ = ["BLOCKS", "DAG", "LOCAL", "LOGGING", "OP", "RENAMED", "TOP", "TRACER", "WITHOUT_EFFECT"]

Rules = Mapping[str, Value]

_PORT: Final = whole(1024, 65_535, ANY_PORT)
_COUNT: Final = whole(1)

TOP: Final[Rules] = {
    "rpc_port": _PORT,
    "http_port": _PORT,
    "worker_num": _COUNT,
    "build_dag_each_worker": flag,
    "http_status": flag,
    "grpc_gateway_port": whole(),
}
DAG: Final[Rules] = {
    "is_thread_op": flag,
    "retry": _COUNT,
    "use_profile": flag,
    "channel_size": whole(0),
    "channel_recv_frist_arrive": flag,
    "client_type": choice(("brpc", "grpc", "local_predictor")),
    "enable_prometheus": flag,
    "prometheus_port": _PORT,
    "max_queue": whole(0),
    "request_timeout": whole(),
}
TRACER: Final[Rules] = {"interval_s": whole()}
OP: Final[Rules] = {
    "concurrency": _COUNT,
    "timeout": whole(),
    "retry": _COUNT,
    "batch_size": _COUNT,
    "auto_batching_timeout": whole(),
    "server_endpoints": texts,
    "client_type": text,
    "client_config": text,
    "fetch_list": texts,
    "use_encryption_model": flag,
    "encryption_key": text,
    "model_name": text,
}
LOCAL: Final[Rules] = {
    "model_config": text,
    "client_type": text,
    "fetch_list": texts,
    "workdir": text,
    "thread_num": _COUNT,
    "device_type": whole(-1, 6),
    "devices": text,
    "mem_optim": flag,
    "ir_optim": flag,
    "use_mkldnn": flag,
    "mkldnn_cache_capacity": whole(0),
    "mkldnn_op_list": texts,
    "mkldnn_bf16_op_list": texts,
    "precision": text,
    "use_calib": flag,
    "min_subgraph_size": whole(),
    "reload_interval_s": number(0),
}
LOGGING: Final[Rules] = {
    "level": level,
    "max_bytes": _COUNT,
    "backups": whole(0),
    "rate_limit": _COUNT,
    "enabled": flag,
}

BLOCKS: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("dag", "op", "logging"),
    "dag": ("tracer",),
    "op": ("local_service_conf",),
}
"""The blocks that a block can hold."""

RENAMED: Final[Mapping[str, Mapping[str, str]]] = {"dag": {"channel_recv_first_arrive": "channel_recv_frist_arrive"}}
"""Other spellings of keys, by block."""

WITHOUT_EFFECT: Final[Mapping[str, Mapping[str, str]]] = {
    "": {
        "grpc_gateway_port": "HTTP is served without a gateway",
        "build_dag_each_worker": "one process serves; `is_thread_op: false` gives the Ops processes of their own",
    },
    "dag": {"client_type": "each Op says how its model is reached"},
    "local_service_conf": {
        "workdir": "no server is started for the model",
        "mem_optim": "OpenVINO reuses memory by itself",
        "ir_optim": "OpenVINO always optimises",
        "use_mkldnn": "OpenVINO runs on oneDNN",
        "mkldnn_cache_capacity": "OpenVINO keeps a cache of its own",
        "mkldnn_op_list": "OpenVINO chooses by itself",
        "mkldnn_bf16_op_list": "`precision` says it for the whole model",
        "use_calib": "it belongs to TensorRT",
        "min_subgraph_size": "it belongs to TensorRT",
        "reload_interval_s": "a model is read once, when the server starts",
    },
}
