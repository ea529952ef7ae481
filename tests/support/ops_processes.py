"""Pipelines of one Op that runs in processes, by the names under which their workers make them."""

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

from ovmstrio.ops import Op
from ovmstrio.runtimes.ops.config.op_settings import DagSettings, OpSettings, PipelineSettings
from ovmstrio.runtimes.ops.executor import LoadedPipeline, PipelineSource
from tests.support.ops import single


class Told(Op):
    def init_op(self) -> None:
        self.count = 0

    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        (one,) = input_dicts.values()
        self.count += 1
        _do(one["x"])
        return {"x": one["x"]}

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        if fetch_data["x"] == "object":
            return {"x": threading.Event()}
        if fetch_data["x"] == "junk":
            os.write(int(sys.argv[1]), b"no message")
            return {"x": "never read"}
        return {"x": f"{self.concurrency_idx} {os.getpid()} {self.count}"}


def _do(deed: str) -> None:
    deed, _, file = deed.partition(":")
    match deed:
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
    command = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    process = subprocess.Popen(command, pass_fds=(int(sys.argv[1]),))
    file.write_text(str(process.pid))


class Stuck(Op):
    def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        if feed_batch[0]["x"] == "wait":
            threading.Event().wait(60)
        return {"x": str(os.getpid())}


class Arrays(Op):
    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        (one,) = input_dicts.values()
        array = one["x"]
        array += 1
        return {"x": array, "small": np.arange(3, dtype=np.int16), "texts": ["a", "b"], "scalar": np.float32(2)}

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        fetch_data["x"] *= fetch_data.pop("scalar")
        return fetch_data


class Unprepared(Op):
    def init_op(self) -> None:
        raise OSError("no such dictionary")


class Dead(Op):
    def init_op(self) -> None:
        os._exit(7)


_OPS: dict[str, type[Op]] = {one.__name__: one for one in (Told, Stuck, Arrays, Unprepared, Dead)}


def load(argument: str) -> LoadedPipeline:
    """Make the pipeline ``Name concurrency batch_size``, in the server and in each worker."""
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
    argument = f"{name} {concurrency} {batch_size}"
    return load(argument), source(argument)


def source(argument: str) -> PipelineSource:
    return PipelineSource("tests.support.ops_processes:load", argument)
