"""What Python nodes import: ``Tensor`` and the context of the run."""

from pyovms.context import Context, Storage, current_context
from pyovms.tensor import Tensor

__all__ = ["Context", "Storage", "Tensor", "current_context"]
