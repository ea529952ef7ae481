"""What nodes do, by the names that graph files use.

Built-in calculators are imported when a graph first names them.  Packages add their own through the entry-point group
``ovmstrio.calculators``: an entry point is called like the calculator and loads to a
:class:`~ovmstrio.graphs.calculator.CalculatorKind`.  A built-in one wins over an entry point of its name.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, cast

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.graphs.calculator import CalculatorKind
from ovmstrio.util.truncation import text_of

__all__ = ["ENTRY_POINT_GROUP", "find_kind", "known_names"]

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


def known_names() -> tuple[str, ...]:
    """Give the names that graph files may use, sorted."""
    return tuple(sorted(_BUILT_IN.keys() | entry_points(group=ENTRY_POINT_GROUP).names))


def find_kind(name: str) -> CalculatorKind | None:
    """Give the calculator of this name, None where there is none.

    Raises:
        ConfigError: an entry point has this name and does not load, or loads to something else.
    """
    place = _BUILT_IN.get(name)
    if place is not None:
        module, attribute = place
        return cast("CalculatorKind", getattr(import_module(module), attribute))
    for found in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return _load(found)
    return None


def _load(found: EntryPoint) -> CalculatorKind:
    try:
        kind = found.load()
    except Exception as error:  # importing a stranger's module can raise anything
        raise _broken(found, f"does not load: {type(error).__name__}: {text_of(error)}") from error
    if isinstance(kind, type):
        raise _broken(found, f"loads to the class {kind.__name__}; let it name an instance")
    missing = [method for method in ("contract", "load") if not callable(getattr(kind, method, None))]
    if missing:
        raise _broken(found, f"loads to {_show(kind)}, which has no method {' and no method '.join(missing)}")
    return cast("CalculatorKind", kind)


def _broken(found: EntryPoint, reason: str) -> ConfigError:
    package = found.dist.name if found.dist is not None else "an unknown package"
    message = f"calculator {found.name!r}: the entry point {found.value!r} of {package} {reason}"
    return ConfigError([Problem(message, suggestion=f"mend or uninstall {package}")])


def _show(kind: Any) -> str:
    return f"an object of type {type(kind).__name__}"
