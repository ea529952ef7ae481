"""Buffer exporter for this Python version: ``__buffer__`` since 3.12, an ndarray subclass before."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

# Type checkers must not take tensors for arrays.
if TYPE_CHECKING or sys.version_info >= (3, 12):
    from ovmstrio.graphs.python_nodes.api.buffer_exporter import Exporter, over_array, over_buffer
else:
    from ovmstrio.graphs.python_nodes.api.array_exporter import Exporter, over_array, over_buffer

__all__ = ["Exporter", "over_array", "over_buffer"]
