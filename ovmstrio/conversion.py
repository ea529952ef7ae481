"""Public API of ``ovms prepare``: conversion of model files into versions of a model repository."""

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
