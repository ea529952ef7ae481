"""A server of one pipeline of Ops: gRPC, HTTP and KServe v2 over an executor, and how scripts are run as servers."""

from ovmstrio.ops_server.running import ServiceOptions, run_script_service, run_service, serve_service
from ovmstrio.ops_server.scripts import run_as_main
from ovmstrio.ops_server.serving import Listening, PipelineExecutor, RunningPipeline, serve_pipeline

__all__ = [
    "Listening",
    "PipelineExecutor",
    "RunningPipeline",
    "ServiceOptions",
    "run_as_main",
    "run_script_service",
    "run_service",
    "serve_pipeline",
    "serve_service",
]
