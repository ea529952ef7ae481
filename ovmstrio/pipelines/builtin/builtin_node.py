"""Built-in custom nodes: interface, execution, and lookup by name or library path."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Final, Protocol

import structlog
import trio

from ovmstrio.core.errors import ConfigError, CustomNodeFailure, Problem
from ovmstrio.core.tensor import BY_NAME, Array
from ovmstrio.pipelines.builtin.parameters import Parameters
from ovmstrio.pipelines.custom_node import ItemInfo, read_only_views
from ovmstrio.pipelines.native.library import NodeIdentity
from ovmstrio.util.extras import Extra, way_to_install
from ovmstrio.util.load_limit import run_load

log = structlog.get_logger(__name__)


class BuiltinNodeFunction(Protocol):
    """A built-in node, created with its parameters.

    ``is_instant``: a run takes less time than a switch to a thread.
    """

    is_instant: ClassVar[bool]
    inputs: Mapping[str, ItemInfo]
    outputs: Mapping[str, ItemInfo]

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs. Blocks; called from several threads at once."""
        ...


def describe_item(name: str, datatype: str, *shape: int) -> ItemInfo:
    """Return the description of an input or output."""
    return ItemInfo(name, BY_NAME[datatype], shape)


class BuiltinNode:
    """Custom node that runs a built-in; see :class:`~ovmstrio.pipelines.custom_node.CustomNode`."""

    def __init__(self, identity: NodeIdentity, builtin: BuiltinNodeFunction) -> None:
        self.inputs = builtin.inputs
        self.outputs = builtin.outputs
        self._identity = identity
        self._limiter = trio.CapacityLimiter(os.cpu_count() or 1)
        self._builtin = builtin

    async def execute(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the node once, in a worker thread unless the node is instant."""
        for info in self.inputs.values():
            self._check(inputs.get(info.name), info)
        if self._builtin.is_instant:
            await trio.lowlevel.checkpoint()
            return self._run(read_only_views(inputs))
        return await trio.to_thread.run_sync(
            self._run, read_only_views(inputs), abandon_on_cancel=True, limiter=self._limiter
        )

    async def aclose(self) -> None:
        """Do nothing."""
        await trio.lowlevel.checkpoint()

    def _run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        try:
            return self._builtin.run(inputs)
        except CustomNodeFailure as failure:
            raise self._failed(str(failure)) from None

    def _check(self, array: Array | None, info: ItemInfo) -> None:
        if array is None:
            raise self._failed(f"input {info.name!r} is missing")
        if info.datatype is not None and array.dtype != info.datatype.numpy:
            expected, found = info.datatype.name, array.dtype.name
        elif not _fits(array.shape, info.shape):
            expected, found = str(info.shape), str(array.shape)
        else:
            return
        raise self._failed(f"invalid input {info.name!r} - Expected: {expected}; Actual: {found}")

    def _failed(self, detail: str) -> CustomNodeFailure:
        return self._identity.failed("NODE_LIBRARY_EXECUTION_FAILED", detail)


def _fits(shape: tuple[int, ...], allowed: tuple[int, ...]) -> bool:
    return len(shape) == len(allowed) and all(wanted in (-1, size) for size, wanted in zip(shape, allowed, strict=True))


async def open_builtin(builtin: str, name: str, params: Mapping[str, str]) -> BuiltinNode:
    """Create a built-in node, which needs no closing."""
    module = f"{__package__}.{builtin}"
    try:
        kind = getattr(await run_load(lambda: import_module(module)), CLASS_BY_NAME[builtin])
    except ModuleNotFoundError as error:
        if error.name != "cv2":
            raise
        fix = f"install it: {way_to_install(Extra.VISION)}"
        raise ConfigError([Problem(f"the custom node {builtin} needs OpenCV", suggestion=fix)]) from None
    parameters = Parameters(params)
    node: BuiltinNodeFunction = kind(parameters)
    for problem in parameters.finish():
        log.warning("custom node parameter problem found", node=name, problem=str(problem))
    return BuiltinNode(NodeIdentity(name, Path(builtin)), node)


CLASS_BY_NAME: Final[Mapping[str, str]] = {
    "add_one": "AddOne",
    "east_ocr": "EastOcr",
    "face_blur": "FaceBlur",
    "horizontal_ocr": "HorizontalOcr",
    "image_transformation": "ImageTransformation",
    "model_zoo_intel_object_detection": "ObjectDetection",
}
"""Class name by node; the module has the node's name and is imported on use, because it needs OpenCV."""
BUILTIN_NAMES: Final = tuple(CLASS_BY_NAME)
_CONTAINER_FOLDER: Final = Path("/ovms/lib/custom_nodes")
"""Library folder of OVMS's container image."""

_PREFIX: Final = "libcustom_node_"
_SUFFIX: Final = ".so"


def builtin_name(library: Path) -> str | None:
    """Return the built-in node for a short name or a library path of OVMS's container image; None for other paths.

    An existing library file takes precedence over the built-in node.
    """
    if library.is_file():
        return None
    if library.parent == _CONTAINER_FOLDER and library.name.startswith(_PREFIX) and library.suffix == _SUFFIX:
        name = library.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    else:
        name = str(library)
    return name if name in BUILTIN_NAMES else None
