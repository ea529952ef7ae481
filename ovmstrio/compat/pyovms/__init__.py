"""API of Python nodes: ``Tensor``, ``HttpPayload`` and the context of the call."""

from ovmstrio.graphs.python_nodes.api import Context, HttpPayload, Storage, Tensor, current_context

__all__ = ["Context", "HttpPayload", "Storage", "Tensor", "current_context"]
