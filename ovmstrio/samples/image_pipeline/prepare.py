"""Preparation of the sample image_pipeline: writes the graph and the classifier that it calls."""

from __future__ import annotations

from pathlib import Path

from ovmstrio.samples.copying import copy_graph
from ovmstrio.samples.image_classifier.prepare import write as write_classifier

__all__ = ["ENTRIES", "write"]

_write_graph = copy_graph(__file__, "preprocess.py", "postprocess.py", "labels.txt", "subconfig.json")


def write(files: Path, directory: Path) -> None:
    """Write the graph's folder, including the model that ``subconfig.json`` names."""
    _write_graph(files, directory)
    version = directory / "model" / "1"
    version.mkdir(parents=True)
    write_classifier(files, version)


ENTRIES = {"image_pipeline": write}
