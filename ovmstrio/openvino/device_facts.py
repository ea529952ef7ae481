"""What a device says of a model that it has compiled, for those who look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.openvino.runtime import OPENVINO_ERRORS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import openvino as ov

__all__ = ["BOUND", "device_facts"]

BOUND: Final = "bound to cores"

_ASKED: Final = {
    "EXECUTION_DEVICES": "devices",
    "INFERENCE_PRECISION_HINT": "precision",
    "PERFORMANCE_HINT": "performance hint",
    "INFERENCE_NUM_THREADS": "threads",
    "ENABLE_CPU_PINNING": BOUND,
}


def device_facts(model: ov.CompiledModel) -> Mapping[str, Any]:
    """Give devices, precision, hint and threads, as far as the device tells; takes some microseconds."""
    facts = {}
    for asked, name in _ASKED.items():
        try:
            found: Any = model.get_property(asked)
        except (*OPENVINO_ERRORS, AttributeError):
            continue
        facts[name] = ", ".join(map(str, found)) if isinstance(found, list) else _plain(found)
    return facts


def _plain(value: Any) -> str | int:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = value if isinstance(value, int) else str(value)
    # Types and enumerations print as "<Type: 'float32'>" and "PerformanceMode.LATENCY".
    return text if isinstance(text, int) else text.removeprefix("<Type: '").removesuffix("'>").rpartition(".")[2]
