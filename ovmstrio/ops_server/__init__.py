"""A server of one pipeline of Ops: gRPC, HTTP and KServe v2 over an executor, and how scripts are run as servers."""

from ovmstrio.ops_server.running import ServiceOptions, run_script_service, run_service, serve_service
from ovmstrio.ops_server.serving import Listening, RunningPipeline, serve_pipeline

__all__ = [
    "Listening",
    "RunningPipeline",
    "ServiceOptions",
    "run_script_service",
    "run_service",
    "serve_pipeline",
    "serve_service",
]
