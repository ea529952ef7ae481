"""What the nodes of a pipeline take and give, whether they are models, graphs, or custom nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ovmstrio.core.datatypes import INVALID
from ovmstrio.core.tensor import ANY_SIZE, Dim, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.request import ServableMetadata
    from ovmstrio.runtimes.pipelines.custom_nodes.custom_node import CustomNode, ItemInfo

__all__ = [
    "NodeSignature",
    "common_shape",
    "is_open",
    "shown_dims",
    "signature_of_custom_node",
    "signature_of_servable",
]


@dataclass(frozen=True, slots=True)
class NodeSignature:
    """Inputs and outputs of one node, by name."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


def is_open(spec: TensorSpec) -> bool:
    """Tell whether nothing is known of a tensor beforehand: an input or output of a graph."""
    return spec.datatype is INVALID


def signature_of_servable(metadata: ServableMetadata) -> NodeSignature:
    """Give the signature of a node that calls a servable."""
    return NodeSignature(
        {spec.name: spec for spec in metadata.inputs},
        {spec.name: spec for spec in metadata.outputs},
    )


def signature_of_custom_node(node: CustomNode) -> NodeSignature:
    """Give the signature of a custom node; what it says no known type of is open."""
    return NodeSignature(
        {name: _spec_of(info) for name, info in node.inputs.items()},
        {name: _spec_of(info) for name, info in node.outputs.items()},
    )


def _spec_of(info: ItemInfo) -> TensorSpec:
    dims = tuple(ANY_SIZE if size < 0 else Dim.fixed(size) for size in info.shape)
    return TensorSpec(info.name, info.datatype or INVALID, dims, batch_axis=None)


def common_dim(one: Dim, other: Dim) -> Dim | None:
    """Give the sizes that both have; None if there are none."""
    highs = [dim.high for dim in (one, other) if dim.high != -1]
    common = Dim(max(one.low, other.low), min(highs, default=-1))
    return common if common.high == -1 or common.low <= common.high else None


def common_shape(one: Sequence[Dim], other: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """Give the shapes that fit both; None if there are none."""
    if len(one) != len(other):
        return None
    dims = [common_dim(a, b) for a, b in zip(one, other, strict=True)]
    found = tuple(dim for dim in dims if dim is not None)
    return found if len(found) == len(dims) else None


def shown_dims(dims: Sequence[Dim]) -> str:
    """Print a shape."""
    return f"[{','.join(map(str, dims))}]"
