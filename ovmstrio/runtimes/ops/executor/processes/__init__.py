"""Workers that are processes of their own, so that a crash costs the requests in it and not the server."""

from ovmstrio.runtimes.ops.executor.processes.pipeline_source import LoadedPipeline, PipelineSource
from ovmstrio.runtimes.ops.executor.processes.process_worker import ProcessWorker

__all__ = ["LoadedPipeline", "PipelineSource", "ProcessWorker"]
