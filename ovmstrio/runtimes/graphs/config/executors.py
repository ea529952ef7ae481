"""Executors: checked as OpenVINO Model Server does.  Nodes run as tasks here, so they change nothing."""

from __future__ import annotations

from typing import Any, Final

from ovmstrio.config.findings import did_you_mean
from ovmstrio.protocol.descriptors import POOL
from ovmstrio.runtimes.graphs.config.found import INITIALIZATION, GraphFindings
from ovmstrio.runtimes.graphs.config.places import Place, line_of, places_of

__all__ = ["check_executors"]

_TYPES: Final = ("ApplicationThreadExecutor", "ThreadPoolExecutor")
_POOL: Final = "ThreadPoolExecutor"
_RESERVED: Final = frozenset({"default", "gpu"})


def check_executors(message: Any, place: Place, findings: GraphFindings) -> None:
    """Check what a graph says of executors, and that its nodes name those that it has."""
    first: dict[str, int] = {}
    for number, (executor, at) in enumerate(zip(message.executor, places_of(place, "executor"), strict=True)):
        if executor.name in first:
            details = f'ExecutorConfig for "{executor.name}" is given twice'
            fix = f"keep one; line {first[executor.name]} has it too"
        else:
            details, fix = _wrong(executor, message)
            first[executor.name] = at.line
        if details:
            findings.add(INITIALIZATION, f"INVALID_ARGUMENT: {details}", at.line, f"executor[{number}]", fix=fix)
    for number, (node, at) in enumerate(zip(message.node, places_of(place, "node"), strict=True)):
        if node.executor and node.executor not in first:
            findings.add(
                INITIALIZATION,
                f'INVALID_ARGUMENT: The executor "{node.executor}" is not declared in an ExecutorConfig.',
                line_of(at, "executor"), f"node[{number}].executor",
                fix=did_you_mean(node.executor, first, otherwise="remove it: nodes run as tasks"),
            )  # fmt: skip


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
