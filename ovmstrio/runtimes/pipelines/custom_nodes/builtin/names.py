"""The names and paths by which a configuration asks for a custom node that comes with the server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["BUILTIN_NAMES", "CLASS_OF", "builtin_name"]

CLASS_OF: Final[Mapping[str, str]] = {
    "add_one": "AddOne",
    "east_ocr": "EastOcr",
    "face_blur": "FaceBlur",
    "horizontal_ocr": "HorizontalOcr",
    "image_transformation": "ImageTransformation",
    "model_zoo_intel_object_detection": "ObjectDetection",
}
"""The class of each node, which is in the module of the node's name; imported when a node is opened, for OpenCV."""
BUILTIN_NAMES: Final = tuple(CLASS_OF)
_CONTAINER_FOLDER: Final = Path("/ovms/lib/custom_nodes")
"""Where OVMS's container image has the libraries."""

_PREFIX: Final = "libcustom_node_"
_SUFFIX: Final = ".so"


def builtin_name(library: Path) -> str | None:
    """Give the name of the node that a path means: a short name, or a library of OVMS's container.

    The latter means the library itself where there is such a file.
    """
    if library.is_file():
        return None
    if library.parent == _CONTAINER_FOLDER and library.name.startswith(_PREFIX) and library.suffix == _SUFFIX:
        name = library.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    else:
        name = str(library)
    return name if name in BUILTIN_NAMES else None
