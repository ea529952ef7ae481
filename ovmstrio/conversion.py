"""Files of models as versions of a model repository: what ``ovms prepare`` does, for programs."""

from ovmstrio.inference.conversion import (
    Conversion,
    Converted,
    convert,
    detect_state,
    new_folder,
    new_version,
    parse_input_form,
    save,
)

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
