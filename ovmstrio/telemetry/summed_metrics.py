"""The metrics of several processes as those of one server, in Prometheus's text format."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["counted_only", "restricted", "sum_metrics"]

_LABELS: Final = r'\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\}'
_SAMPLE: Final = re.compile(rf"(?P<key>(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:{_LABELS})?) (?P<value>[^ ]+)(?P<rest>.*)")
_END: Final = "# EOF"
"""The last line of OpenMetrics's format."""
_NOT_SUMMED: Final[dict[str, Callable[[Iterable[float]], float]]] = {
    "ovmstrio_ready": min,
    "ovmstrio_inline": max,
    "ovmstrio_bound_to_cores": max,
    "ovmstrio_model_load_seconds": max,
    "process_start_time_seconds": min,
}
"""Figures of one process that stand for all; all others are added up."""
_TYPE: Final = "# TYPE "
_COUNTING: Final = frozenset({"counter", "histogram", "summary", "unknown"})
"""Counters with names as OVMS has them are of no type that OpenMetrics knows."""
_TOTAL: Final = "_total"
_OWN: Final = ("ovmstrio_", "pd_")
"""How families of the server's begin; what code of users counts may be called anything."""


def sum_metrics(texts: Sequence[bytes]) -> bytes:
    """Make one text of those of several processes: each family once, each sample once, in the order of the first.

    What only others have follows in its family, or at the end.
    """
    merged = _Merged()
    for text in texts:
        merged.add(text.decode())
    return merged.render().encode()


def counted_only(text: bytes) -> bytes:
    """Give the families of a text that count, and leave out those that tell how something is now."""
    merged = _Merged()
    merged.add(text.decode())
    merged.keep(lambda _, head: any(line.rsplit(" ", 1)[-1] in _COUNTING for line in head if line.startswith(_TYPE)))
    return merged.render().encode()


def restricted(text: bytes, families: Sequence[str]) -> bytes:
    """Give those families of a text that are named, with or without what formats add to names."""
    merged = _Merged()
    merged.add(text.decode())
    merged.keep(lambda name, _: name in families or name.removesuffix(_TOTAL) in families)
    return merged.render().encode()


class _Merged:
    """Families by name, each with its head and with its samples by name and labels."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[list[str], dict[str, float]]] = {}
        self._rests: dict[str, str] = {}
        self._has_end = False

    def add(self, text: str) -> None:
        """Add what one process tells."""
        head: list[str] = []
        samples: dict[str, float] = {}
        # Labels may have other characters that end lines for Python.
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
            # Those of the past come last, and theirs are of long ago.
            self._rests.setdefault(key, match["rest"])
        known = samples.get(key)
        samples[key] = value if known is None else _join_of(match["name"])((known, value))

    def keep(self, is_kept: Callable[[str, Sequence[str]], bool]) -> None:
        """Leave out the families of whose name and head a function says so."""
        self._families = {name: each for name, each in self._families.items() if is_kept(name, each[0])}

    def render(self) -> str:
        """Write everything."""
        lines = []
        for head, samples in self._families.values():
            lines += head
            lines += [f"{key} {_shown(value)}{self._rests.get(key, '')}" for key, value in samples.items()]
        return "\n".join([*lines, *([_END] if self._has_end else ()), ""])


def _join_of(name: str) -> Callable[[Iterable[float]], float]:
    """Give what makes one figure of those of two processes; moments are not added up."""
    is_moment = name.endswith("_created") and name.startswith(_OWN)
    return min if is_moment else _NOT_SUMMED.get(name, math.fsum)


def _shown(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
