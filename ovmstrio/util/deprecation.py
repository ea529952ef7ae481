"""Deprecated import paths, settings, commands and metrics, which work for one more release."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

RENAMED_SETTINGS: Final = {
    "compiled_gb": "compile_cache_gb",
    "console_bodies": "console_body_bytes",
    "core_sharing": "cpu_pinning",
    "request_receive_seconds": "request_read_timeout",
    "sequence_store_seconds": "sequence_flush_seconds",
    "stalled_client_seconds": "client_stall_timeout",
    "trial_load": "crash_probe",
}
"""New names of server settings and options by their old names."""

RENAMED_COMMANDS: Final = {
    "generate": "handler dockerfile",
    "run": "paddle run",
    "sequences": "sequence list",
    "stop": "paddle stop",
    "trace": "paddle trace",
}
"""New names of commands of ``ovms`` by their old names."""


@dataclass(frozen=True, slots=True)
class OldMetric:
    """Earlier name of a metric family.

    Attributes:
        scale: factor to the earlier unit.
        of: label values of the samples that the earlier family had, without these labels.
    """

    name: str
    scale: float = 1.0
    of: Mapping[str, str] = field(default_factory=dict)


_MICROSECONDS: Final = 1e6

OLD_METRICS: Final[Mapping[str, OldMetric]] = {
    "ovmstrio_auth_failures": OldMetric("ovmstrio_refused_callers"),
    "ovmstrio_batch_wait_time_seconds": OldMetric("ovmstrio_batch_wait_time_us", _MICROSECONDS),
    "ovmstrio_cpu_pinned": OldMetric("ovmstrio_bound_to_cores"),
    "ovmstrio_cpu_pinning_changes": OldMetric("ovmstrio_core_choices"),
    "ovmstrio_execution_switches": OldMetric("ovmstrio_placement_moves"),
    "ovmstrio_inference_on_loop": OldMetric("ovmstrio_inline"),
    "ovmstrio_node_time_seconds": OldMetric("ovmstrio_node_time_us", _MICROSECONDS),
    "ovmstrio_op_stage_seconds": OldMetric("ovmstrio_op_stage_us", _MICROSECONDS),
    "ovmstrio_padded_elements": OldMetric("ovmstrio_bucketed_elements"),
    "ovmstrio_rejected_requests": OldMetric("ovmstrio_refused_requests", of={"reason": "queue_full"}),
    "ovmstrio_request_time_seconds": OldMetric("ovmstrio_request_time_us", _MICROSECONDS),
    "ovmstrio_thread_queue_length": OldMetric("ovmstrio_waiting_calls"),
}
"""Earlier names of metric families by their names."""


def rename_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the new names of renamed ones, and warn of old names; a new name takes precedence."""
    renamed = {RENAMED_SETTINGS[name]: value for name, value in given.items() if name in RENAMED_SETTINGS}
    for name in given.keys() & RENAMED_SETTINGS.keys():
        message = f"the setting {name} is now {RENAMED_SETTINGS[name]}; the old name works in this release only"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
    return renamed | {name: value for name, value in given.items() if name not in RENAMED_SETTINGS}


def forward_names(module: str, target: str, names: Collection[str] | Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that takes old names from another or the same module, with a warning.

    Args:
        module: the module that had the names.
        target: the module that has them now; imported at the first access.
        names: the names that are forwarded, or the new names by the old ones; others are an ``AttributeError``.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = names[name] if isinstance(names, Mapping) else name
        message = f"{module}.{name} is now {target}.{new}; the old name works in this release only"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(import_module(target), new)

    return get
