"""Preparation of the sample custom_node_c: compiles the custom nodes and builds the model between them."""

from __future__ import annotations

from pathlib import Path

from ovmstrio.samples.add_one.prepare import write as write_add_one
from ovmstrio.samples.compiling import compile_node
from ovmstrio.samples.copying import copy_files

__all__ = ["ENTRIES", "write_nodes"]

_SOURCES = ("spread.c", "choose.c")
_copy_sources = copy_files(__file__, "nodes.h", *_SOURCES)


def write_nodes(files: Path, directory: Path) -> None:
    """Write the sources, so that users can change and recompile them, and the compiled libraries."""
    _copy_sources(files, directory)
    for source in _SOURCES:
        compile_node(directory / source)


ENTRIES = {"custom_node_c_add_one": write_add_one, "custom_node_c": write_nodes}
