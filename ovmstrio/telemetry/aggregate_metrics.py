"""Aggregation of the metrics of several workers, in Prometheus's text formats."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

from ovmstrio.core.metric_families import selected_families
from ovmstrio.util.deprecation import OLD_METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_LABELS: Final = r'\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\}'
_SAMPLE: Final = re.compile(rf"(?P<key>(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:{_LABELS})?) (?P<value>[^ ]+)(?P<rest>.*)")
_END: Final = "# EOF"
"""Last line of the OpenMetrics format."""
_NOT_SUMMED: Final[dict[str, Callable[[Iterable[float]], float]]] = {
    "ovmstrio_ready": min,
    "ovmstrio_build_info": max,
    "ovmstrio_certificate_expiry_timestamp_seconds": min,
    "ovmstrio_config_last_reload_success_timestamp_seconds": max,
    "ovmstrio_inference_on_loop": max,
    "ovmstrio_cpu_pinned": max,
    "ovmstrio_model_load_seconds": max,
    "ovmstrio_service_state": max,
    # Every worker reports the count of the parent process.
    "ovmstrio_worker_deaths_total": max,
    # The limit applies to each process.
    "process_max_fds": max,
    "process_open_fds": max,
    "process_start_time_seconds": min,
}
"""Metrics that are not summed, with their aggregation."""
_NOT_SUMMED.update({old.name: _NOT_SUMMED[name] for name, old in OLD_METRICS.items() if name in _NOT_SUMMED})
_TYPE: Final = "# TYPE "
_COUNTING: Final = frozenset({"counter", "histogram", "summary", "unknown"})
"""OpenMetrics counters with OVMS names have type ``unknown``."""
_TOTAL: Final = "_total"
_OWN: Final = ("ovmstrio_", "pd_")
"""Prefixes of the server's families; user families may have any name."""


def sum_metrics(texts: Sequence[bytes]) -> bytes:
    """Merge the texts of several workers; families and samples keep the order of the first text."""
    merged = _MergedMetrics()
    for text in texts:
        merged.add(text.decode())
    return merged.render().encode()


def without_gauges(text: bytes) -> bytes:
    """Return the counters, histograms and summaries of a text without its gauges."""
    merged = _MergedMetrics()
    merged.add(text.decode())
    merged.keep(lambda _, head: any(line.rsplit(" ", 1)[-1] in _COUNTING for line in head if line.startswith(_TYPE)))
    return merged.render().encode()


def select_families(text: bytes, families: Sequence[str]) -> bytes:
    """Return the families of a text that names of families or samples select."""
    merged = _MergedMetrics()
    merged.add(text.decode())
    wanted = selected_families(families)
    merged.keep(lambda name, _: name in wanted or name.removesuffix(_TOTAL) in wanted)
    return merged.render().encode()


class _MergedMetrics:
    """Families by name, each with its comment lines and its samples by name and labels."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[list[str], dict[str, float]]] = {}
        self._rests: dict[str, str] = {}
        self._has_end = False

    def add(self, text: str) -> None:
        head: list[str] = []
        samples: dict[str, float] = {}
        # Not ``splitlines``: labels may contain other characters that Python takes as line ends.
        for line in text.split("\n"):
            if line == _END:
                self._has_end = True
            elif line.startswith("# HELP "):
                head, samples = self._families.setdefault(line.split(" ", 3)[2], ([line], {}))
            elif line.startswith("#"):
                if line not in head:
                    head.append(line)
            elif match := _SAMPLE.fullmatch(line):
                self._add_sample(samples, match)

    def _add_sample(self, samples: dict[str, float], match: re.Match[str]) -> None:
        key, value = match["key"], float(match["value"])
        if match["rest"]:
            # Metrics of exited workers come last; their timestamps are old.
            self._rests.setdefault(key, match["rest"])
        known = samples.get(key)
        samples[key] = value if known is None else _merge_function(match["name"])((known, value))

    def keep(self, is_kept: Callable[[str, Sequence[str]], bool]) -> None:
        self._families = {name: each for name, each in self._families.items() if is_kept(name, each[0])}

    def render(self) -> str:
        lines = []
        for head, samples in self._families.values():
            lines += head
            lines += [f"{key} {_format_value(value)}{self._rests.get(key, '')}" for key, value in samples.items()]
        return "\n".join([*lines, *([_END] if self._has_end else ()), ""])


def _merge_function(name: str) -> Callable[[Iterable[float]], float]:
    """Return the function that merges two values; timestamps are not summed."""
    is_timestamp = name.endswith("_created") and name.startswith(_OWN)
    return min if is_timestamp else _NOT_SUMMED.get(name, math.fsum)


def _format_value(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
