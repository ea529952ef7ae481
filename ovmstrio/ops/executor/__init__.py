"""Runs a graph of Ops.

::

    infer() ──> Admission ──> RequestRun ──> OpRunner: Channel ──> Batcher ──> WorkerPool ──> Worker
                worker_num    one a request  one an Op: channel_size  batch_size  concurrency   its own copy of the Op
"""

from ovmstrio.ops.executor.executor import Executor
from ovmstrio.ops.executor.opening import GRACE_SECONDS, open_executor
from ovmstrio.ops.executor.pipeline_source import LoadedPipeline, PipelineSource

__all__ = ["GRACE_SECONDS", "Executor", "LoadedPipeline", "PipelineSource", "open_executor"]
