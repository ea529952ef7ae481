"""Workers that are processes of their own, so that a crash costs the requests in it and not the server."""

from ovmstrio.runtimes.ops.executor.processes.source import Loaded, Source
from ovmstrio.runtimes.ops.executor.processes.worker import ProcessWorker

__all__ = ["Loaded", "ProcessWorker", "Source"]
