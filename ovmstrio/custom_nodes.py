"""Deprecated name of :mod:`ovmstrio.ext.custom_nodes`."""

from ovmstrio.ext import custom_nodes as _custom_nodes
from ovmstrio.util.deprecation import forward_names

__getattr__ = forward_names(__name__, "ovmstrio.ext.custom_nodes", _custom_nodes.__all__)
