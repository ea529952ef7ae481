"""Custom nodes whose library runs in a process of its own, so that its crash fails requests and not the server."""

from ovmstrio.runtimes.pipelines.custom_nodes.isolation.isolated_node import (
    GRACE_SECONDS,
    IsolatedNode,
    open_isolated_node,
)

__all__ = ["GRACE_SECONDS", "IsolatedNode", "open_isolated_node"]
