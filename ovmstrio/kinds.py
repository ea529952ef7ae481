"""Deprecated name of :mod:`ovmstrio.ext.kinds`."""

from ovmstrio.ext import kinds as _kinds
from ovmstrio.util.deprecation import forward_names

__getattr__ = forward_names(__name__, "ovmstrio.ext.kinds", {*_kinds.__all__, "Takes", "content_mark", "tree_mark"})
