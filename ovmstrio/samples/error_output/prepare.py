"""Preparation of the sample: copies the graph and its handler."""

from __future__ import annotations

from ovmstrio.samples.copying import copy_graph

__all__ = ["ENTRIES"]

ENTRIES = {"error_output": copy_graph(__file__, "inverse.py")}
