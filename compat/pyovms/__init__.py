"""What Python nodes import: ``Tensor``, ``HttpPayload`` and the context of the run."""

from pyovms.context import Context, Storage, current_context
from pyovms.http_payload import HttpPayload
from pyovms.tensor import Tensor

__all__ = ["Context", "HttpPayload", "Storage", "Tensor", "current_context"]
