"""Deprecated name of :mod:`ovmstrio.ext.calculators`."""

from ovmstrio.ext import calculators as _calculators
from ovmstrio.util.deprecation import forward_names

__getattr__ = forward_names(__name__, "ovmstrio.ext.calculators", _calculators.__all__)
