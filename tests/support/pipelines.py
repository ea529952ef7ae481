"""Pipelines and custom nodes without a server, with the models that they call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any, TypeVar

import numpy as np
import trio

from ovmstrio.config.specs import NodeInput, NodeOutput, PipelineNode, PipelineSpec
from ovmstrio.core.errors import NotFound
from ovmstrio.core.request import InferResponse
from ovmstrio.core.service import LeasedServable, Servable
from ovmstrio.core.tensor import Tensor
from ovmstrio.pipelines.builtin.builtin_node import BuiltinNode, open_builtin
from ovmstrio.pipelines.custom_node import CustomNode
from ovmstrio.pipelines.loading import load_pipeline
from ovmstrio.pipelines.python_node import open_python_node
from ovmstrio.pipelines.servable import PipelineServable
from tests.support.servables import raw_request

R = TypeVar("R")
T = TypeVar("T")


@asynccontextmanager
async def hosting() -> AsyncIterator[trio.Nursery]:
    """Yield a nursery whose tasks end before the block does; an error of the block is raised outside a group."""
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except Exception as error:  # noqa: BLE001 - raised below
            failure = error
    if failure is not None:
        raise failure


async def gather(function: Callable[[T], Awaitable[R]], values: Iterable[T]) -> list[R]:
    """Call an async function with all values at the same time, and return its results in the order of the values."""
    results: dict[int, R] = {}

    async def call(number: int, value: T) -> None:
        results[number] = await function(value)

    async with trio.open_nursery() as nursery:
        for number, value in enumerate(values):
            nursery.start_soon(call, number, value)
    return [results[number] for number in range(len(results))]


DOUBLER = """
    import numpy as np

    def get_inputs_info(params):
        return {"x": ("FP32", [1, -1])}

    def get_outputs_info(params):
        return {"y": (np.float32, (1, 0))}

    def execute(inputs, params):
        return {"y": inputs["x"] * np.float32(params.get("factor", 2))}
"""
"""A Python node that multiplies by its parameter ``factor``."""


def write_node(folder: Path, source: str = DOUBLER, file: str = "node.py") -> Path:
    path = folder / file
    path.write_text(dedent(source).lstrip("\n"))
    return path


@asynccontextmanager
async def opened_python(
    folder: Path, source: str = DOUBLER, *, hide_errors: bool = False, **params: str
) -> AsyncIterator[CustomNode]:
    """Open a Python node called ``node`` of this source."""
    file = write_node(folder, source)
    async with hosting() as tasks:
        node = await open_python_node(file, "node", params, tasks=tasks, hide_errors=hide_errors)
        try:
            yield node
        finally:
            await node.aclose()


async def opened_builtin(builtin: str, **params: object) -> BuiltinNode:
    return await open_builtin(builtin, "node", {name: str(value) for name, value in params.items()})


ARITHMETIC = '''
    """Adds up its inputs; ``op`` says what to make of the sum."""

    import numpy as np
    import trio


    def get_inputs_info(params):
        shape = [-1, *_shape(params)] if params["op"] == "gather" else _shape(params)
        return {name: ("FP32", shape) for name in params["inputs"].split(",")}


    def get_outputs_info(params):
        shape = [-1, *_shape(params)] if params["op"] == "split" else _shape(params)
        return {"y": ("FP32", shape)}


    def _shape(params):
        return [int(size) for size in params.get("shape", "1,2").split(",")]


    async def execute(inputs, params):
        for _ in range(int(params.get("steps", 0))):
            await trio.lowlevel.checkpoint()
        constant = np.float32(params.get("constant", 0))
        total = sum(array * np.float32(index + 1) for index, (_, array) in enumerate(sorted(inputs.items())))
        if params["op"] == "fail":
            raise ValueError("set to fail")
        if params["op"] == "gather":
            return {"y": total.sum(axis=0) + constant}
        if params["op"] == "split":
            shards = [total * np.float32(index + 1) + constant for index in range(int(params["parts"]))]
            return {"y": np.stack(shards) if shards else np.zeros((0, *total.shape), np.float32)}
        return {"y": total + constant}
'''
"""A Python library whose nodes add up their inputs, each times its place among them."""


def write_library(folder: Path, source: str = ARITHMETIC, name: str = "arithmetic") -> Path:
    path = folder / f"{name}.py"
    path.write_text(dedent(source).lstrip("\n"))
    return path


def dag_entry(name: str, model: str, item: tuple[str, str], result: tuple[str, str], **options: Any) -> dict[str, Any]:
    """Return the entry of a pipeline that calls a model; ``options`` are of its node.

    ``item`` and ``result`` are the names that the pipeline and the model have for the input and the output.
    """
    node = {
        "name": "node",
        "type": "DL model",
        "model_name": model,
        "inputs": [{item[1]: {"node_name": "request", "data_item": item[0]}}],
        "outputs": [{"data_item": result[1], "alias": result[1]}],
        **options,
    }
    outputs = [{result[0]: {"node_name": "node", "data_item": result[1]}}]
    return {"name": name, "inputs": [item[0]], "nodes": [node], "outputs": outputs}


def pipeline_entry(name: str, called: str, item: str = "b", output: str = "a", **options: Any) -> dict[str, Any]:
    """Return the entry of a pipeline whose input and output have the same names as those of the called service."""
    return dag_entry(name, called, (item, item), (output, output), **options)


def make_node(
    name: str, inputs: Mapping[str, str], outputs: Mapping[str, str] | Sequence[str] = ("y",), **settings: Any
) -> PipelineNode:
    """Make a node; inputs are ``{"input": "source.item"}``, outputs ``{"alias": "output"}`` or names without alias.

    It is one of the library ``arithmetic`` unless the settings say otherwise; their ``params`` may hold anything.
    """
    settings.setdefault("origin", f"config.json:{len(name)}")
    if "model_name" not in settings:
        settings.setdefault("library", "arithmetic")
    params = {key: str(value) for key, value in settings.pop("params", {}).items()}
    if settings.get("library") == "arithmetic":
        params = {"op": "add", "inputs": ",".join(inputs), **params}
    aliases = outputs if isinstance(outputs, Mapping) else {output: output for output in outputs}
    return PipelineNode(
        name=name,
        inputs=_sources(inputs),
        outputs=tuple(NodeOutput(data_item=item, alias=alias) for alias, item in aliases.items()),
        params=params,
        **settings,
    )


def make_pipeline(
    nodes: Sequence[PipelineNode],
    outputs: Mapping[str, str],
    *,
    inputs: Sequence[str] = ("x",),
    demultiply_count: int | None = None,
    libraries: Mapping[str, Path] | None = None,
) -> PipelineSpec:
    """Make a pipeline; outputs are ``{"output": "source.item"}``."""
    return PipelineSpec(
        name="pipeline",
        base_path=Path("/"),
        origin="config.json:1",
        inputs=tuple(inputs),
        outputs=_sources(outputs),
        nodes=tuple(nodes),
        demultiply_count=demultiply_count,
        libraries=dict(libraries or {}),
    )


def _sources(given: Mapping[str, str]) -> tuple[NodeInput, ...]:
    found = []
    for name, source in given.items():
        node, _, item = source.partition(".")
        found.append(NodeInput(name=name, node=node, data_item=item))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Held:
    servable: Servable


@asynccontextmanager
async def serving_pipeline(spec: PipelineSpec, **servables: Servable) -> AsyncIterator[PipelineServable]:
    """Load a pipeline that may call these servables, and close it at the end."""

    async def lease(name: str, version: str = "", /) -> AbstractContextManager[LeasedServable]:
        if name not in servables or version not in ("", "1"):
            raise NotFound("Model with requested name is not found")
        return nullcontext(_Held(servables[name]))

    async with hosting() as tasks:
        pipeline = await load_pipeline(spec, lease=lease, tasks=tasks)
        try:
            yield pipeline
        finally:
            await pipeline.aclose()


async def call(pipeline: PipelineServable, **arrays: Any) -> dict[str, np.ndarray[Any, Any]]:
    return answers(
        await pipeline.infer(raw_request({name: np.asarray(each, np.float32) for name, each in arrays.items()}))
    )


def answers(response: InferResponse) -> dict[str, np.ndarray[Any, Any]]:
    return {output.name: output.array for output in response.outputs if isinstance(output, Tensor)}
