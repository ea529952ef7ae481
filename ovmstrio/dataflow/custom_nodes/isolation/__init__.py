"""Custom nodes whose library runs in a process of its own, so that its crash fails requests and not the server."""

from ovmstrio.dataflow.custom_nodes.isolation.node import GRACE_SECONDS, IsolatedNode, open_isolated_node

__all__ = ["GRACE_SECONDS", "IsolatedNode", "open_isolated_node"]
