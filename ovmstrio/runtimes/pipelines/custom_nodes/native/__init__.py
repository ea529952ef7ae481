"""Custom nodes that are shared libraries with the C interface of ``include/custom_node_interface.h``."""

from ovmstrio.runtimes.pipelines.custom_nodes.native.native_node import GRACE_SECONDS, NativeNode, open_native_node

__all__ = ["GRACE_SECONDS", "NativeNode", "open_native_node"]
