"""Op pipeline executor.

::

    infer() ──> PipelineAdmission ──> RequestRun ──> OpRunner: Channel ──> Batcher ──> WorkerPool ──> Worker
                worker_num            per request    per Op: channel_size  batch_size  concurrency    copy of the Op
"""

from ovmstrio.ops.executor.executor import Executor, open_executor
from ovmstrio.ops.executor.pipeline_source import LoadedPipeline, PipelineSource
from ovmstrio.ops.executor.workers import GRACE_SECONDS

__all__ = ["GRACE_SECONDS", "Executor", "LoadedPipeline", "PipelineSource", "open_executor"]
