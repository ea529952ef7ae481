"""Worker processes, which run what belongs to users beside the server: one part, whoever uses it.

::

    server                                       worker process
    KeptProcess   starts one after the other
    WorkerProcess ── requests under numbers ──>  run_program ── WorkRequests, each a task
                  <── answers in any order ────
            MessageChannel: plain data and arrays, small ones in a packet, large ones as a file in memory
"""

from ovmstrio.work.messages.message_packets import NO_MESSAGE
from ovmstrio.work.processes.kept_process import KeptProcess
from ovmstrio.work.processes.worker_process import WorkerEnded, WorkerProcess
from ovmstrio.work.processes.worker_program import WorkRequest, WorkRequests, leave, run_program

__all__ = [
    "NO_MESSAGE",
    "KeptProcess",
    "WorkRequest",
    "WorkRequests",
    "WorkerEnded",
    "WorkerProcess",
    "leave",
    "run_program",
]
