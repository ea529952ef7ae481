"""From a model as some framework wrote it to a version of a repository that a server has been seen to load.

::

    file or folder ─> find_models ─> read_source ─> describe_inputs ─> quantize ─> make_stateful ─> new_version
                      (sources)     (frameworks)      (inputs)     (quantization)   (states)            │
                                                                                        loaded as a server would

Nothing of the source's framework has to be installed, but for PyTorch's, which only torch itself can read.
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
