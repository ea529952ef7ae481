"""Random pipelines with random demultiplexers compute what numpy computes.

The reference has no shards: what is split into ``k`` is one array with a dimension more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ovmstrio.config.specs import PipelineNode, PipelineSpec
from ovmstrio.core.tensor import Array
from tests.support.examples import examples
from tests.support.pipelines import call, make_node, make_pipeline, serving_pipeline, write_library

WIDTH = 2


@dataclass(frozen=True)
class _Item:
    source: str
    level: tuple[str, ...]
    whole: Array


@dataclass
class Case:
    inputs: dict[str, Array] = field(default_factory=dict)
    nodes: list[PipelineNode] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    expected: dict[str, Array] = field(default_factory=dict)
    demultiply_count: int | None = None

    def spec(self, library: Path) -> PipelineSpec:
        return make_pipeline(
            self.nodes,
            self.outputs,
            inputs=list(self.inputs),
            demultiply_count=self.demultiply_count,
            libraries={"arithmetic": library},
        )


def _numbers(shape: tuple[int, ...]) -> st.SearchStrategy[Array]:
    count = int(np.prod(shape))
    values = st.lists(st.integers(-9, 9), min_size=count, max_size=count)
    return values.map(lambda found: np.array(found, np.float32).reshape(shape))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Make pipelines of up to nine nodes."""
    case = Case()
    dynamic = draw(st.booleans())  # then there is one demultiplexer at most
    entry = draw(st.sampled_from([None, 1, 2, 3]))
    level: tuple[str, ...] = ()
    shape: tuple[int, ...] = (1, WIDTH)
    if entry is not None:
        case.demultiply_count, level, shape = (-1 if dynamic else entry), ("request",), (entry, *shape)
    items = []
    for name in ("a", "b")[: draw(st.integers(1, 2))]:
        case.inputs[name] = draw(_numbers(shape))
        items.append(_Item(f"request.{name}", level, case.inputs[name]))
    may_split = not (dynamic and entry is not None)
    for index in range(draw(st.integers(1, 9))):
        item, node = _add(draw, f"n{index}", items, may_split=may_split, dynamic=dynamic)
        may_split = may_split and not (dynamic and node.demultiply_count is not None)
        case.nodes.append(node)
        items.append(item)
    _close(draw, case, items)
    return case


def _add(
    draw: st.DrawFn, name: str, items: list[_Item], *, may_split: bool, dynamic: bool
) -> tuple[_Item, PipelineNode]:
    first = draw(st.sampled_from(items))
    level = first.level
    alike = [item for item in items if item.level == level]
    taken = [first, *draw(st.lists(st.sampled_from(alike), max_size=2))]
    inputs = {f"i{position}": item.source for position, item in enumerate(taken)}
    constant = draw(st.integers(-3, 3))
    total: Array = np.sum([np.float32(position + 1) * item.whole for position, item in enumerate(taken)], axis=0)
    params: dict[str, object] = {"constant": constant, "steps": draw(st.integers(0, 3))}
    kinds = ["add", *(["split"] if may_split and len(level) < 3 else []), *(["gather"] if level else [])]
    op = draw(st.sampled_from(kinds))
    settings: dict[str, Any] = {}
    if op == "add":
        whole = total + constant
    elif op == "split":
        parts = draw(st.integers(1, 3))
        params["parts"] = parts
        settings["demultiply_count"] = -1 if dynamic else parts
        shards = [total * np.float32(index + 1) + constant for index in range(parts)]
        whole, level = np.stack(shards, axis=len(level)), (*level, name)
    else:
        settings["gather_from_node"] = level[-1]
        whole, level = total.sum(axis=len(level) - 1) + constant, level[:-1]
    node = make_node(name, inputs, params={"op": op, **params}, **settings)
    return _Item(f"{name}.y", level, whole), node


def _close(draw: st.DrawFn, case: Case, items: list[_Item]) -> None:
    taken = {f"{given.node}.{given.data_item}" for node in case.nodes for given in node.inputs}
    loose = [item for item in items if item.source not in taken and not item.source.startswith("request.")]
    extra = draw(st.lists(st.sampled_from([item for item in items if not item.source.startswith("request.")])))
    for index, item in enumerate([*loose, *extra]):
        case.outputs[f"o{index}"] = item.source
        case.expected[f"o{index}"] = item.whole
    for name in [name for name in case.inputs if f"request.{name}" not in taken]:
        case.nodes.append(make_node(f"takes_{name}", {"i0": f"request.{name}"}))
        case.outputs[f"of_{name}"] = f"takes_{name}.y"
        case.expected[f"of_{name}"] = case.inputs[name]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_library(tmp_path_factory.mktemp("library"))


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_pipelines_compute_the_same_as_numpy(case: Case, library: Path) -> None:

    async def main() -> None:
        async with serving_pipeline(case.spec(library)) as pipeline:
            for _ in range(2):
                found = await call(pipeline, **case.inputs)
                assert found.keys() == case.expected.keys()
                for name, array in case.expected.items():
                    np.testing.assert_array_equal(found[name], array, err_msg=name)
            declared = {spec.name: spec.shape for spec in pipeline.metadata.outputs}
            for name, array in case.expected.items():
                assert len(declared[name]) == array.ndim
                assert all(dim.accepts(size) for dim, size in zip(declared[name], array.shape, strict=True))

    trio.run(main)
