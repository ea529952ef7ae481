"""Built-in custom nodes: interface, execution, and lookup by name or library path."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Final, Protocol, TypeVar

import structlog
import trio

from ovmstrio.config.documents import did_you_mean
from ovmstrio.core.errors import ConfigError, CustomNodeFailure, Problem
from ovmstrio.core.tensor import BY_NAME, Array
from ovmstrio.pipelines.custom_node import ItemInfo, read_only_views
from ovmstrio.pipelines.native.library import NodeIdentity
from ovmstrio.util.extras import Extra, install_command
from ovmstrio.util.load_limit import run_load

# ----------------------------------------------------------------------
# Parser of the parameters of built-in nodes; collects all problems
# ----------------------------------------------------------------------

_T = TypeVar("_T", int, float)


class Parameters:
    """Parameters of one node.

    An invalid value is reported and replaced by a valid one, so that parsing continues. As in OVMS, an optional
    parameter that is not a number falls back to its default, with a warning.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given
        self._known: set[str] = set()
        self._problems: list[Problem] = []

    # Values

    def integer(
        self, name: str, *, default: int | None = None, low: int = 1, high: int = 2**31 - 1, must_be_odd: bool = False
    ) -> int:
        """Return an integer; required without a default."""
        expected = f"{'an odd' if must_be_odd else 'a whole'} number" + _bounds(low, high)
        value = self._number(name, int, default, expected)
        if value is None:
            return low
        if not low <= value <= high or (must_be_odd and value % 2 == 0):
            return self._replaced(name, expected, low)
        return value

    def number(
        self, name: str, *, default: float | None = None, low: float = -math.inf, high: float = math.inf
    ) -> float:
        """Return a number; required without a default."""
        expected = "a number" + _bounds(low, high)
        value = self._number(name, float, default, expected)
        if value is None:
            return 0.0
        return value if low <= value <= high and math.isfinite(value) else self._replaced(name, expected, 0.0)

    def flag(self, name: str) -> bool:
        """Return a boolean; anything but ``true`` is false."""
        text = self._text(name)
        if text not in (None, "true", "false"):
            self._warn(name, "true or false", "false is used")
        return text == "true"

    def choice(self, name: str, choices: tuple[str, ...], default: str | None = None) -> str:
        """Return one of the choices; required without a default."""
        text = self._text(name)
        if text is None and default is not None:
            return default
        if text not in choices:
            self.refuse(name, " or ".join(choices))
            return choices[0]
        return text

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list such as ``[1,2.5]``; empty if the parameter is missing."""
        text = self._text(name)
        if text is None:
            return ()
        inner = text.strip()
        if inner.startswith("[") and inner.endswith("]"):
            values = [_parsed(part, float) for part in inner[1:-1].split(",")]
            if all(value is not None and math.isfinite(value) for value in values):
                return tuple(value for value in values if value is not None)
        self.refuse(name, "a list of numbers, such as [123.68,116.78,103.94]")
        return ()

    def is_given(self, name: str) -> bool:
        """Return whether a parameter is configured."""
        return name in self._given

    # Problems

    def refuse(self, name: str, expected: str, message: str = "invalid parameter") -> None:
        """Report an invalid or missing parameter."""
        if name not in self._given:
            message, fix = "the parameter is missing", f'add "{name}" to the params of the node'
            self._problems.append(Problem(message, path=f"params.{name}", expected=expected, suggestion=fix))
        else:
            found = repr(self._given[name])
            self._problems.append(Problem(message, path=f"params.{name}", expected=expected, found=found))

    def finish(self) -> tuple[Problem, ...]:
        """Return the warnings, once all parameters have been read."""
        for name in sorted(self._given.keys() - self._known):
            fix = did_you_mean(name, self._known, otherwise=f"known: {', '.join(sorted(self._known))}")
            message = "unknown parameter"
            self._problems.append(Problem(message, path=f"params.{name}", suggestion=fix, severity="warning"))
        if any(problem.severity == "error" for problem in self._problems):
            raise ConfigError(self._problems)
        return tuple(self._problems)

    # Helpers

    def _text(self, name: str) -> str | None:
        self._known.add(name)
        return self._given.get(name)

    def _number(self, name: str, kind: Callable[[str], _T], default: _T | None, expected: str) -> _T | None:
        """Return the value or the default; None if an error was reported."""
        text = self._text(name)
        value = None if text is None else _parsed(text, kind)
        if value is not None:
            return value
        if default is None:
            self.refuse(name, expected)
        elif text is not None:
            self._warn(name, expected, f"the default {default} is used")
        return default

    def _warn(self, name: str, expected: str, message: str) -> None:
        self._problems.append(
            Problem(
                message, path=f"params.{name}", expected=expected, found=repr(self._given[name]), severity="warning"
            )
        )

    def _replaced(self, name: str, expected: str, value: _T) -> _T:
        self.refuse(name, expected)
        return value


def _parsed(text: str, kind: Callable[[str], _T]) -> _T | None:
    try:
        return kind(text)
    except ValueError:
        return None


def _bounds(low: float, high: float) -> str:
    if math.isinf(low):
        return ""
    return f" from {low} on" if high >= 2**31 - 1 else f" from {low} to {high}"


# ----------------------------------------------------------------------
# Built-in custom nodes: interface, execution, and lookup by name or library path
# ----------------------------------------------------------------------

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
        fix = f"install it: {install_command(Extra.VISION)}"
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
