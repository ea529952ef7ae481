"""Conversion of models of other frameworks to a repository version that is known to load.

::

    file or folder ─> find_models ─> read_source ─> describe_inputs ─> quantize ─> make_stateful ─> new_version
                      (sources)     (convert)         (inputs)     (quantization)  (inputs)             │
                                                                                        loaded as a server would

Only PyTorch models need their framework installed.
"""

from __future__ import annotations

from ovmstrio.inference.conversion.convert import Conversion, Converted, convert, new_folder, new_version, save
from ovmstrio.inference.conversion.inputs import detect_state, parse_input_form

__all__ = [
    "Conversion",
    "Converted",
    "convert",
    "detect_state",
    "new_folder",
    "new_version",
    "parse_input_form",
    "save",
]
