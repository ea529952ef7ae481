"""API of Python nodes, which user code imports as ``pyovms``: tensors and the context of the call."""

from ovmstrio.graphs.python_nodes.api.context import Context, Storage, current_context
from ovmstrio.graphs.python_nodes.api.http_payload import HttpPayload
from ovmstrio.graphs.python_nodes.api.tensor import Tensor

__all__ = ["Context", "HttpPayload", "Storage", "Tensor", "current_context"]

for _public in (Context, HttpPayload, Storage, Tensor, current_context):
    _public.__module__ = "pyovms"
