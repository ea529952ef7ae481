"""Deprecated name of :mod:`ovmstrio.ext.batching`."""

from ovmstrio.ext import batching as _batching
from ovmstrio.util.deprecation import forward_names

__getattr__ = forward_names(__name__, "ovmstrio.ext.batching", _batching.__all__)
