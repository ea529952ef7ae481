"""Rows 1, 51 and 101 of Fisher's data set of flowers."""

from __future__ import annotations

__all__ = ["FLOWERS"]

FLOWERS = (
    ((5.1, 3.5, 1.4, 0.2), "setosa"),
    ((7.0, 3.2, 4.7, 1.4), "versicolor"),
    ((6.3, 3.3, 6.0, 2.5), "virginica"),
)
"""Lengths and widths of sepals and petals in cm, and the species."""
