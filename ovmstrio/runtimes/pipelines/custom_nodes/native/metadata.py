"""What a node says of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import byref, c_int, c_void_p

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.pipelines.custom_nodes.native.abi import DATATYPES, NodeTensorInfo
from ovmstrio.runtimes.pipelines.custom_nodes.native.initialized import InitializedNode
from ovmstrio.runtimes.pipelines.custom_nodes.native.outputs import MOST_ITEMS, shape_at
from ovmstrio.runtimes.pipelines.custom_nodes.ports import ItemInfo

__all__ = ["inputs_info", "outputs_info"]


def inputs_info(node: InitializedNode) -> Mapping[str, ItemInfo]:
    """Ask a node for its inputs; blocking.

    Raises:
        ConfigError: it failed (``NODE_LIBRARY_METADATA_FAILED``), or what it gave cannot be used
            (``NODE_LIBRARY_OUTPUTS_CORRUPTED``, ``NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT``).
    """
    return _info(node, node.library.get_inputs_info, "getInputsInfo")


def outputs_info(node: InitializedNode) -> Mapping[str, ItemInfo]:
    """Ask a node for its outputs; blocking.

    Raises:
        ConfigError: as for inputs.
    """
    return _info(node, node.library.get_outputs_info, "getOutputsInfo")


def _info(node: InitializedNode, function: Callable[..., int], symbol: str) -> Mapping[str, ItemInfo]:
    address, count = c_void_p(), c_int()
    status = function(byref(address), byref(count), node.params.array, node.params.count, node.manager)
    unusable = node.identity.unusable
    if status:
        raise unusable("NODE_LIBRARY_METADATA_FAILED", f"{symbol} returned {status}")
    if address.value is None:
        raise unusable("NODE_LIBRARY_OUTPUTS_CORRUPTED", f"the pointer that {symbol} gave is null")
    try:
        if not 0 < count.value <= MOST_ITEMS:
            detail = f"{symbol} gave {count.value}, expected 1 to {MOST_ITEMS}"
            raise unusable("NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT", detail)
        return _items(node, symbol, list((NodeTensorInfo * count.value).from_address(address.value)))
    finally:
        node.release(address.value)


def _items(node: InitializedNode, symbol: str, rows: list[NodeTensorInfo]) -> Mapping[str, ItemInfo]:
    failure: ConfigError | None = None
    items: dict[str, ItemInfo] = {}
    for index, row in enumerate(rows):
        shape = shape_at(row.dims, row.dims_count)
        if row.name is None or shape is None:
            detail = f"entry {index} that {symbol} gave has no name, or no shape"
            failure = failure or node.identity.unusable("NODE_LIBRARY_METADATA_FAILED", detail)
            continue
        name = row.name.decode(errors="replace")
        items[name] = ItemInfo(name, DATATYPES.get(row.precision), tuple(size or -1 for size in shape))
    for address in {row.dims for row in rows if row.dims is not None}:
        node.release(address)
    if failure is not None:
        raise failure
    return items
