"""What a pipeline tells of its own inputs and outputs, computed from the nodes behind and before them.

A pipeline's input is what every node that takes it accepts; an output is what the node gives, with a dimension in
front for each demultiplexer that the exit gathers, as in OVMS.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ovmstrio.core.datatypes import INVALID
from ovmstrio.core.tensor import ANY_SIZE, Dim, TensorSpec
from ovmstrio.runtimes.pipelines.node_signatures import common_shape, is_open, shown_dims
from ovmstrio.runtimes.pipelines.pipeline_problems import Code, problem_of
from ovmstrio.runtimes.pipelines.structure import DYNAMIC, ENTRY, EXIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.config.specs import PipelineNode
    from ovmstrio.core.errors import Problem
    from ovmstrio.runtimes.pipelines.node_signatures import NodeSignature
    from ovmstrio.runtimes.pipelines.structure import Structure

__all__ = ["describe_inputs", "describe_outputs"]


def describe_inputs(
    structure: Structure, signatures: Mapping[str, NodeSignature]
) -> tuple[tuple[TensorSpec, ...], list[Problem]]:
    """Give the pipeline's inputs by name, and what keeps those that go to several nodes from being one thing."""
    entry = structure.nodes[ENTRY]
    inputs: list[TensorSpec] = []
    problems: list[Problem] = []
    for output in entry.outputs:
        found: TensorSpec | None = None
        for edge in structure.out_of(ENTRY):
            wanted = signatures[edge.target].inputs.get(edge.name) if edge.target in signatures else None
            if edge.item != output.data_item or wanted is None:
                continue
            spec = replace(wanted, name=output.data_item)
            if entry.demultiply_count is not None and not edge.gathers and not is_open(spec):
                spec = _behind_count(spec, entry.demultiply_count)
            merged = spec if found is None else _common(found, spec)
            if merged is None:
                problems.append(_ambiguous(entry, found, spec))
            found = merged or found
        inputs.append(found or TensorSpec(output.data_item, INVALID, (), batch_axis=None))
    return tuple(sorted(inputs, key=lambda spec: spec.name)), problems


def describe_outputs(
    structure: Structure, signatures: Mapping[str, NodeSignature], inputs: Sequence[TensorSpec]
) -> tuple[TensorSpec, ...]:
    """Give the pipeline's outputs by name; one that is taken from an input is what that is."""
    given = {spec.name: spec for spec in inputs}
    outputs = []
    for edge in structure.into(EXIT):
        found = given.get(edge.item) if edge.source == ENTRY else signatures[edge.source].outputs.get(edge.item)
        spec = found or TensorSpec(edge.name, INVALID, ())
        if edge.source != ENTRY and not is_open(spec):
            levels = structure.levels[edge.source]
            counts = tuple(_count_of(structure, signatures, demultiplexer) for demultiplexer in levels)
            spec = replace(spec, shape=(*counts, *spec.shape), layout=_deeper(spec.layout, len(counts)))
        outputs.append(replace(spec, name=edge.name))
    return tuple(sorted(outputs, key=lambda spec: spec.name))


def _behind_count(spec: TensorSpec, count: int) -> TensorSpec:
    first = ANY_SIZE if count == DYNAMIC else Dim.fixed(count)
    return replace(spec, shape=(first, *spec.shape), batch_axis=0, layout=_deeper(spec.layout, 1))


def _deeper(layout: str, levels: int) -> str:
    """Put the dimensions of demultiplexers before a layout, of which the outermost is its batch."""
    return "N" + "?" * (levels - 1) + layout.replace("N", "?") if layout and levels else layout


def _common(one: TensorSpec, other: TensorSpec) -> TensorSpec | None:
    if is_open(one):
        return other
    if is_open(other):
        return one
    shape = common_shape(one.shape, other.shape)
    if shape is None or one.datatype is not other.datatype or (one.layout and other.layout not in ("", one.layout)):
        return None
    return replace(one, shape=shape, layout=one.layout or other.layout)


def _ambiguous(entry: PipelineNode, one: TensorSpec | None, other: TensorSpec) -> Problem:
    first = "" if one is None else _shown(one)
    message = f"the input {other.name!r} goes to nodes that want different things: {first} and {_shown(other)}"
    return problem_of(entry, Code.AMBIGUOUS, message, "give each an input of its own")


def _shown(spec: TensorSpec) -> str:
    return f"{spec.datatype.name} {shown_dims(spec.shape)}{f' {spec.layout}' if spec.layout else ''}"


def _count_of(structure: Structure, signatures: Mapping[str, NodeSignature], demultiplexer: str) -> Dim:
    count = structure.nodes[demultiplexer].demultiply_count
    if count is not None and count != DYNAMIC:
        return Dim.fixed(count)
    outputs = signatures[demultiplexer].outputs if demultiplexer in signatures else {}
    for output in structure.nodes[demultiplexer].outputs:
        spec = outputs.get(output.data_item)
        if spec is not None and spec.shape:
            return spec.shape[0]
    return ANY_SIZE
