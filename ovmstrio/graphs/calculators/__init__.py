"""Registry of calculators by the names that graph files use.

Built-in calculators are imported on first use. Packages add calculators through the entry-point group
``ovmstrio.calculators``: an entry point has the calculator's name and loads a
:class:`~ovmstrio.graphs.calculator.CalculatorKind`. A built-in calculator takes precedence over an entry point.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Final, cast

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.graphs.calculator import CalculatorKind
from ovmstrio.util.truncation import text_of

__all__ = ["ENTRY_POINT_GROUP", "calculator_names", "find_calculator"]

ENTRY_POINT_GROUP: Final = "ovmstrio.calculators"

_HERE: Final = "ovmstrio.graphs.calculators"
_BUILT_IN: Final = {
    "BeginLoopTensorCalculator": (f"{_HERE}.loops", "BEGIN_LOOP"),
    "ConcatenateTensorVectorCalculator": (f"{_HERE}.vectors", "CONCATENATE_VECTOR"),
    "ConstantSidePacketCalculator": (f"{_HERE}.side_packets", "CONSTANT_SIDE_PACKET"),
    "DefaultSidePacketCalculator": (f"{_HERE}.side_packets", "DEFAULT_SIDE_PACKET"),
    "EmbeddingsCalculatorOV": (f"{_HERE}.text", "EMBEDDINGS"),
    "EndLoopTensorCalculator": (f"{_HERE}.loops", "END_LOOP"),
    "FlowLimiterCalculator": (f"{_HERE}.flow", "FLOW_LIMITER"),
    "GateCalculator": (f"{_HERE}.flow", "GATE"),
    "HttpLLMCalculator": (f"{_HERE}.text", "HTTP_LLM"),
    "ImageGenCalculator": (f"{_HERE}.text", "IMAGE_GEN"),
    "MergeCalculator": (f"{_HERE}.flow", "MERGE"),
    "MuxCalculator": (f"{_HERE}.flow", "MUX"),
    "OpenVINOInferenceCalculator": (f"{_HERE}.inference", "INFERENCE"),
    "OpenVINOModelServerSessionCalculator": (f"{_HERE}.inference", "SESSION"),
    "PacketClonerCalculator": (f"{_HERE}.flow", "PACKET_CLONER"),
    "PacketResamplerCalculator": (f"{_HERE}.flow", "PACKET_RESAMPLER"),
    "PassThroughCalculator": (f"{_HERE}.flow", "PASS_THROUGH"),
    "PreviousLoopbackCalculator": (f"{_HERE}.loops", "PREVIOUS_LOOPBACK"),
    "PyTensorOvTensorConverterCalculator": (f"{_HERE}.inference", "CONVERTER"),
    "PythonExecutorCalculator": ("ovmstrio.graphs.python_nodes.calculator", "PYTHON_EXECUTOR"),
    "RerankCalculatorOV": (f"{_HERE}.text", "RERANK"),
    "S2tCalculator": (f"{_HERE}.text", "SPEECH_TO_TEXT"),
    "SplitTensorVectorCalculator": (f"{_HERE}.vectors", "SPLIT_VECTOR"),
    "T2sCalculator": (f"{_HERE}.text", "TEXT_TO_SPEECH"),
}


def calculator_names() -> tuple[str, ...]:
    """Return the names that graph files can use, sorted."""
    return tuple(sorted(_BUILT_IN.keys() | entry_points(group=ENTRY_POINT_GROUP).names))


def find_calculator(name: str) -> CalculatorKind | None:
    """Return the calculator with this name, or None.

    Raises:
        ConfigError: the entry point does not load, or loads another type of object.
    """
    location = _BUILT_IN.get(name)
    if location is not None:
        module, attribute = location
        return cast("CalculatorKind", getattr(import_module(module), attribute))
    for found in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return _load(found)
    return None


def _load(found: EntryPoint) -> CalculatorKind:
    try:
        kind = found.load()
    except Exception as error:  # third-party modules can raise anything
        raise _entry_point_error(found, f"does not load: {type(error).__name__}: {text_of(error)}") from error
    if isinstance(kind, type):
        raise _entry_point_error(found, f"loads the class {kind.__name__}, expected an instance")
    missing = [method for method in ("contract", "load") if not callable(getattr(kind, method, None))]
    if missing:
        reason = f"loads an object of type {type(kind).__name__} without method {' and '.join(missing)}"
        raise _entry_point_error(found, reason)
    return cast("CalculatorKind", kind)


def _entry_point_error(found: EntryPoint, reason: str) -> ConfigError:
    package = found.dist.name if found.dist is not None else "an unknown package"
    message = f"calculator {found.name!r}: the entry point {found.value!r} of {package} {reason}"
    return ConfigError([Problem(message, suggestion=f"fix or uninstall {package}")])
