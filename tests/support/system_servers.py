"""Servers that system tests share: one process tree per configuration, started on first use.

Tests do not stop, reconfigure or starve a shared server. Counts in its metrics and logs are compared as differences
or by names that only one test uses. ``recovering_workers`` is the only server whose worker processes tests kill.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

import httpx

from tests.support import ir
from tests.support.all_kinds import OPS, write_all_kinds
from tests.support.graphs import BEFORE_AND_BEHIND, SHOUTING, graph_text, llm_graph, python_node
from tests.support.isolation_checks import SHARED_PROCESSES
from tests.support.pipelines import DOUBLER
from tests.support.processes import OvmsProcess, ProjectProcess, serving, serving_project
from tests.support.projects import write_project
from tests.support.tiny_llm import write_tiny_folder
from tests.support.waits import until
from tests.support.worker_clients import each_worker

MAX_SEQUENCES: Final = 12
"""Sequences that the model ``few`` of the servers of several workers has at a time."""

PID_HANDLER: Final = """
import os

class Handler:
    def handle_get(self):
        return {"pid": os.getpid()}
"""

WAITING_HANDLER: Final = """
import os, pathlib, time

class Handler:
    def handle_get(self):
        return {"pid": os.getpid()}

    def handle_post(self, payload):
        pathlib.Path(payload["begun"]).touch()
        while not pathlib.Path(payload["go"]).exists():
            time.sleep(0.01)
        return {"pid": os.getpid()}
"""

_FATAL_NODE: Final = """
import os, signal

class OvmsPythonModel:
    def execute(self, inputs):
        with open(bytes(inputs[0])[4:].decode(), "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
"""


def write_config(folder: Path, *models: dict[str, Any], **lists: list[dict[str, Any]]) -> Path:
    file = folder / "config.json"
    document = {"model_config_list": [{"config": model} for model in models], **lists}
    file.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return file


# Configurations


_LOGGING: Final = """
import logging

def write_records(name):
    log = logging.getLogger("user.code")
    log.debug("not logged")
    log.info("%s began", name)
    try:
        raise KeyError(name)
    except KeyError:
        log.exception("%s failed", name)
"""
_PRINTING_NODE: Final = f"""{_LOGGING}
from pyovms import Tensor

class OvmsPythonModel:
    def execute(self, inputs):
        print("from", end=" ", flush=True)
        print("graph")
        write_records("graph")
        return [Tensor("out", bytes(inputs[0]).upper())]
"""
_PRINTING_HANDLER: Final = f"""{_LOGGING}
import sys, threading

class Handler:
    async def handle_post(self, payload):
        sys.stderr.write("from handler")
        thread = threading.Thread(target=print, args=("from a thread of the handler",))
        thread.start()
        thread.join()
        write_records("handler")
        return sum(payload)
"""
_PRINTING_OP: Final = _LOGGING + OPS.replace(
    "(given,)", 'print("from op", end="")\n        write_records("op")\n        (given,)'
)


def _all_kinds(folder: Path) -> Sequence[str]:
    config = write_all_kinds(folder, node=_PRINTING_NODE, handler=_PRINTING_HANDLER, ops=_PRINTING_OP)
    document = json.loads(config.read_text())
    node_code = dedent(DOUBLER).replace('    return {"y', "    print('from node')\n    return {\"y")
    (folder / "doubler.py").write_text(node_code)
    document["custom_node_library_config_list"] = [{"name": "doubler", "base_path": str(folder / "doubler.py")}]
    node = {
        "name": "twice",
        "library_name": "doubler",
        "type": "custom",
        "params": {},
        "inputs": [{"x": {"node_name": "request", "data_item": "x"}}],
        "outputs": [{"data_item": "y", "alias": "y"}],
    }
    outputs = [{"y": {"node_name": "twice", "data_item": "y"}}]
    document["pipeline_config_list"].append({"name": "double", "inputs": ["x"], "nodes": [node], "outputs": outputs})
    (graph,), (handler,) = document["mediapipe_config_list"], document["handler_config_list"]
    document["mediapipe_config_list"].append({**graph, "name": "apart", "python_isolation": "process"})
    document["handler_config_list"].append({**handler, "name": "handler_apart", "python_isolation": "process"})
    (folder / "ops_apart").mkdir()
    settings = "worker_num: 4\nlogging: {enabled: false}\ndag: {is_thread_op: false}\n"
    (folder / "ops_apart" / "config.yml").write_text(settings)
    (folder / "ops_apart" / "web_service.py").write_text(_PRINTING_OP)
    document["op_pipeline_config_list"].append({"name": "ops_apart", "path": str(folder / "ops_apart")})
    config.write_text(json.dumps(document, indent=1))
    return "--config_path", str(config), "--log_format", "json"


def _generation(folder: Path) -> Sequence[str]:
    model = write_tiny_folder(folder / "model")
    options = ("--model_name", "chat", "--model_path", str(model), "--task", "text_generation")
    return *options, "--cache_size", "0.05", "--tool_parser", "hermes3"


def _text_graphs(folder: Path, *, with_nodes_only: bool) -> Sequence[str]:
    write_tiny_folder(folder / "nodes")
    graph = BEFORE_AND_BEHIND.replace('models_path: "./"', 'models_path: "./" cache_size: 1')
    (folder / "nodes" / "graph.pbtxt").write_text(graph)
    for name, code in SHOUTING.items():
        (folder / "nodes" / f"{name}.py").write_text(dedent(code))
    graphs = [{"name": "shouting", "base_path": "nodes"}]
    texts = [{"config": {"name": "alone", "base_path": "nodes", "cache_size": 0.1}}]
    if with_nodes_only:
        return "--config_path", str(write_config(folder, mediapipe_config_list=graphs, text_model_config_list=texts))
    write_tiny_folder(folder / "llm")
    (folder / "llm" / "graph.pbtxt").write_text(llm_graph("cache_size: 1,", "max_tokens_limit: 12,"))
    graphs.append({"name": "graph", "base_path": "llm"})
    model = {"name": "in_models", "base_path": "llm"}
    config = write_config(folder, model, mediapipe_config_list=graphs, text_model_config_list=texts)
    return "--config_path", str(config)


def _generation_workers(folder: Path) -> Sequence[str]:
    write_tiny_folder(folder / "llm")
    texts = [{"config": {"name": "tiny", "base_path": "llm", "cache_size": 0.1}}]
    config = write_config(folder, text_model_config_list=texts)
    return "--config_path", str(config), "--workers", "2", "--file-store", str(folder / "files")


def worker_configuration(folder: Path, *names: str, handlers: Sequence[str] = ("who",)) -> Path:
    """Write a configuration for several workers, again with other names of its model if the folder has one."""
    if not (folder / "dummy").exists():
        ir.save(ir.dummy(), folder, "dummy")
        ir.save(ir.accumulator(), folder, "acc")
        write_project(folder / "who", PID_HANDLER, name="who")
    models: list[dict[str, Any]] = [{"name": name, "base_path": str(folder / "dummy")} for name in names or ("dummy",)]
    for name, limit in {"acc": 500, "ordered": 500, "few": MAX_SEQUENCES}.items():
        models.append({"name": name, "base_path": str(folder / "acc"), "stateful": True, "max_sequence_number": limit})
    entries = [{"name": name, "path": str(folder / name)} for name in handlers]
    return write_config(folder, *models, handler_config_list=entries)


def _workers(folder: Path) -> Sequence[str]:
    file = worker_configuration(folder, "dummy", "counted", "shown")
    write_project(folder / "waits", WAITING_HANDLER, name="waits")
    (folder / "fatal").mkdir()
    (folder / "fatal" / "handler.py").write_text(_FATAL_NODE)
    (folder / "fatal" / "graph.pbtxt").write_text(graph_text(python_node("handler.py")))
    document = json.loads(file.read_text(encoding="utf-8"))
    waits = {"name": "waits", "path": str(folder / "waits"), "max_concurrency": 1, "max_queue": 0}
    document["handler_config_list"].append(waits)
    document["mediapipe_config_list"] = [{"name": "fatal", "base_path": str(folder / "fatal")}]
    file.write_text(json.dumps(document), encoding="utf-8")
    addresses = ("--rest_bind_address", f"127.0.0.1,unix:{folder / 'rest'}")
    return "--config_path", str(file), "--workers", "2", *addresses, "--allow_shared_memory"


PROJECT_HANDLER: Final = """
import os
import threading
import time
from pathlib import Path

from cortex_internal.lib.log import logger
import sibling
import elsewhere

SEEN = {name: os.environ.get(name) for name in ("A", "B", "C", "CORTEX_PROCESSES")}

class Handler:
    def __init__(self, config):
        self.thread = threading.get_ident()
        logger.info("made", extra={"config": config, "object": object()})

    def handle_get(self, query_params):
        logger.debug("called")
        if "die" in query_params:
            os.kill(os.getpid(), 9)
        if "wait" in query_params:
            Path(query_params["wait"]).mkdir(parents=True, exist_ok=True)
            (Path(query_params["wait"]) / str(time.time_ns())).touch()
            while not Path(query_params["until"]).exists():
                time.sleep(0.01)
        return {"seen": SEEN, "cwd": os.getcwd(), "sibling": sibling.NAME, "elsewhere": elsewhere.NAME,
                "same_thread": threading.get_ident() == self.thread, "pid": os.getpid()}

    def handle_post(self, payload):
        raise ValueError("a secret")
"""


def write_handler_project(folder: Path, code: str = PROJECT_HANDLER, **keys: object) -> Path:
    """Write a project that imports a module of its folder and one of its ``python_path``; returns its file."""
    file = write_project(folder / "project", code, python_path="lib", **keys)
    (file.parent / "sibling.py").write_text("NAME = 'sibling'")
    (file.parent / "lib").mkdir(exist_ok=True)
    (file.parent / "lib" / "elsewhere.py").write_text("NAME = 'elsewhere'")
    return file


def _project(folder: Path) -> Path:
    file = write_handler_project(folder, env={"A": 1, "B": "b"})
    (file.parent / ".env").write_text("B=changed\nC='see'\n")
    return file


CONFIGURATIONS: Final[dict[str, Callable[[Path], Sequence[str]]]] = {
    "all_kinds": _all_kinds,
    "generation": _generation,
    "text_graphs": lambda folder: _text_graphs(folder, with_nodes_only=False),
    "text_graph_workers": lambda folder: (*_text_graphs(folder, with_nodes_only=True), "--workers", "2"),
    "workers": _workers,
    "recovering_workers": lambda folder: (*_workers(folder), "--readiness_file", str(folder / "ready")),
    "generation_workers": _generation_workers,
}
"""Writes the files of a configuration into a folder, and returns the options of ``ovms serve``."""

PROJECTS: Final[dict[str, Callable[[Path], Path]]] = {
    "project": _project,
    "project_processes": lambda folder: write_handler_project(folder, processes=2, threads_per_process=2),
}
"""Writes a project of handlers into a folder, and returns its file."""


# Servers


@dataclass
class _Started:
    server: Any
    folder: Path
    stack: ExitStack


class SystemServers:
    """Shared servers of one test process; an exited server is restarted on demand."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._started: dict[str, _Started] = {}
        self._count = 0

    def serving(self, name: str) -> OvmsProcess:
        started = self._get(name)
        server: OvmsProcess = started.server
        server.wait_ready()
        if "--workers" in server.process.args:  # type: ignore[operator]  # a list
            with each_worker(server):
                pass  # Both workers accept connections.
        return server

    def project(self, name: str) -> ProjectProcess:
        server: ProjectProcess = self._get(name).server
        until(lambda: server.ask(path="/v2/health/ready").status_code == httpx.codes.OK)
        return server

    def folder(self, name: str) -> Path:
        return self._started[name].folder

    def close(self) -> None:
        for started in self._started.values():
            started.stack.close()
        self._started.clear()

    def _get(self, name: str) -> _Started:
        started = self._started.get(name)
        if started is not None and started.server.process.poll() is not None:
            self._started.pop(name).stack.close()
            started = None
        return started or self._start(name)

    def _start(self, name: str) -> _Started:
        self._count += 1
        folder = self._root / f"{name}-{self._count}"
        folder.mkdir()
        with ExitStack() as stack:
            server: Any
            if name in PROJECTS:
                file = PROJECTS[name](folder / "files")
                server = stack.enter_context(serving_project(file))
            else:
                server = stack.enter_context(serving(*CONFIGURATIONS[name](folder), log=folder / "log"))
            SHARED_PROCESSES.append(server.process.pid)
            self._started[name] = started = _Started(server, folder, stack.pop_all())
        return started
