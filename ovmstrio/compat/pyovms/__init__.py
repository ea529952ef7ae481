"""API of Python nodes: ``Tensor``, ``HttpPayload`` and the context of the call."""

from pyovms.context import Context, Storage, current_context
from pyovms.http_payload import HttpPayload
from pyovms.tensor import Tensor

__all__ = ["Context", "HttpPayload", "Storage", "Tensor", "current_context"]
