"""Executors: checked as OpenVINO Model Server does.  Nodes run as tasks here, so they change nothing."""

from __future__ import annotations

from typing import Any, Final

from ovmstrio.config.findings import Findings, did_you_mean
from ovmstrio.config.located import Located
from ovmstrio.protocol.descriptors import POOL
from ovmstrio.runtimes.graphs.config.graph_messages import INITIALIZATION

__all__ = ["check_executors"]

_TYPES: Final = ("ApplicationThreadExecutor", "ThreadPoolExecutor")
_POOL: Final = "ThreadPoolExecutor"
_RESERVED: Final = frozenset({"default", "gpu"})


def check_executors(message: Any, root: Located, findings: Findings) -> None:
    """Check what a graph says of executors, and that its nodes name those that it has."""
    first: dict[str, int] = {}
    for executor, at in zip(message.executor, root.items("executor"), strict=True):
        if executor.name in first:
            details = f'ExecutorConfig for "{executor.name}" is given twice'
            fix = f"keep one; line {first[executor.name]} has it too"
        else:
            details, fix = _wrong(executor, message)
            first[executor.name] = at.line
        if details:
            findings.refuse(at, f"{INITIALIZATION} - INVALID_ARGUMENT: {details}", suggestion=fix)
    for name, at in ((node.executor, at) for node, at in zip(message.node, root.items("node"), strict=True)):
        if name and name not in first:
            details = f'The executor "{name}" is not declared in an ExecutorConfig.'
            fix = did_you_mean(name, first, otherwise="remove it: nodes run as tasks")
            findings.refuse(at.find("executor"), f"{INITIALIZATION} - INVALID_ARGUMENT: {details}", suggestion=fix)


def _wrong(executor: Any, graph: Any) -> tuple[str, str]:
    """Give what is wrong with one executor and the way out."""
    name, kind = executor.name, executor.type
    if name in _RESERVED or name.startswith("__"):
        return f'"{name}" is reserved and cannot be the name of an executor', "use another name"
    if not name and graph.num_threads:
        return "num_threads is given beside an executor without a name", "remove num_threads"
    if name and not kind:
        return f'executor "{name}" has no type', f'add type: "{_POOL}"'
    if kind and kind not in _TYPES:
        known = did_you_mean(kind, _TYPES, otherwise=f"there are: {', '.join(_TYPES)}")
        return f'"{kind}" is not a registered executor', known
    if kind == _POOL and _threads(executor) <= 0:
        option = "[mediapipe.ThreadPoolExecutorOptions.ext] { num_threads: 4 }"
        return f"a {_POOL} needs num_threads", f"add options {{ {option} }}"
    return "", ""


def _threads(executor: Any) -> int:
    extension = POOL.FindExtensionByName("mediapipe.ThreadPoolExecutorOptions.ext")
    return int(executor.options.Extensions[extension].num_threads)
