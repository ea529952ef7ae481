"""Pipelines of one Op in processes, by the import names that their workers use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ovmstrio.ext.ops import Op
from ovmstrio.ops.executor import LoadedPipeline, PipelineSource
from ovmstrio.ops.settings import DagSettings, OpSettings, PipelineSettings
from tests.support.ops import op_class, single

__all__ = ["load", "loaded"]


class _Acting(Op):
    """Op that executes the action in a request's text; returns the worker's number, process id and request count."""

    def init_op(self) -> None:
        self.count = 0

    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        (one,) = input_dicts.values()
        self.count += 1
        _act(one["x"])
        return {"x": one["x"]}

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        if fetch_data["x"] == "object":
            return {"x": threading.Event()}
        if fetch_data["x"] == "junk":
            os.write(int(sys.argv[1]), b"no message")
            return {"x": "never read"}
        return {"x": f"{self.concurrency_idx} {os.getpid()} {self.count}"}


def _act(action: str) -> None:
    action, _, file = action.partition(":")
    match action:
        case "orphan":
            _leave_a_process(Path(file))
            os.kill(os.getpid(), signal.SIGKILL)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "leave":
            raise SystemExit(4)
        case "wait":
            Path(file).touch()
            threading.Event().wait(60)


def _leave_a_process(file: Path) -> None:
    """Start a process that has a copy of the worker's end of the socket, as one that is forked would, and note it."""
    command = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    process = subprocess.Popen(command, pass_fds=(int(sys.argv[1]),))
    file.write_text(str(process.pid))


def _process(_: Op, feeds: Any) -> Any:
    if feeds[0]["x"] == "wait":
        threading.Event().wait(60)
    return {"x": str(os.getpid())}


def _add_one(_: Op, inputs: Mapping[str, Any]) -> Any:
    array = inputs["@DAGExecutor"]["x"]
    array += 1
    return {"x": array, "small": np.arange(3, dtype=np.int16), "texts": ["a", "b"], "scalar": np.float32(2)}


def _multiply(_: Op, inputs: Any, output: Any) -> Any:
    output["x"] *= output.pop("scalar")
    return output


def _fail(_: Op) -> None:
    raise OSError("no such dictionary")


_OPS: dict[str, type[Op]] = {
    "Acting": _Acting,
    "Stuck": op_class(process=_process),
    "Arrays": op_class(preprocess=_add_one, postprocess=_multiply),
    "Failing": op_class(init_op=_fail),
    "Exiting": op_class(init_op=lambda _: os._exit(7)),
}


def load(argument: str) -> LoadedPipeline:
    """Create the pipeline ``Name concurrency batch_size``, in the server and in each worker."""
    name, concurrency, batch_size = argument.split()
    settings = OpSettings(
        "op",
        concurrency=int(concurrency),
        batch_size=int(batch_size),
        auto_batching_timeout=2000,
        timeout=100 if name == "Stuck" else -1,
    )
    dag = DagSettings(is_thread_op=False)
    return LoadedPipeline(single(_OPS[name]), PipelineSettings(worker_num=20, dag=dag, ops={"op": settings}))


def loaded(name: str, concurrency: int = 1, batch_size: int = 1) -> tuple[LoadedPipeline, PipelineSource]:
    """Return a pipeline and the source from which its workers load it."""
    argument = f"{name} {concurrency} {batch_size}"
    return load(argument), PipelineSource("tests.support.ops_processes:load", argument)
