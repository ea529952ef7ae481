"""What the processes of a server tell of its services, as one answer.

Counts are summed, and percentiles are those of all times together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.api.console.service_inside import MOST_SEQUENCES, tally_times
from ovmstrio.core.time_bands import no_times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["merged_document", "merged_figures", "merged_rows"]

_Row = dict[str, Any]

_CANNOT: Final = ("failed", "loading", "unloaded")
"""States of what cannot be called, what is told of first when they differ."""
_OF_EACH: Final = frozenset({"threads", "streams", "infer requests"})
"""Numbers of one process that say how it is set up; all others are counts of what there is or was."""


def merged_rows(told: Mapping[int, Mapping[str, _Row]]) -> dict[str, _Row]:
    """Make one row for each name of those of some processes, by their numbers."""
    if len(told) == 1:
        return dict(*told.values())
    names = dict.fromkeys(name for rows in told.values() for name in rows)
    return {name: _row({row: rows[name] for row, rows in told.items() if name in rows}) for name in names}


def _row(of: Mapping[int, _Row]) -> _Row:
    first = next(iter(of.values()))
    states = {each["state"] for each in of.values()}
    if len(states) == 1:
        state, reasons = first["state"], {row: each["reason"] for row, each in of.items()}
    else:
        can = not states.issubset(_CANNOT)
        state = "degraded" if can else next(each for each in _CANNOT if each in states)
        reasons = {row: each["reason"] or each["state"] for row, each in of.items() if each["state"] != "ready"}
    versions: dict[str, dict[int, _Row]] = {}
    for row, each in of.items():
        for version in each["versions"]:
            versions.setdefault(version["version"], {})[row] = version
    return {
        **first,
        "state": state,
        "reason": _one_text(reasons, len(of)),
        "versions": [_version(each) for each in versions.values()],
    }


def _version(of: Mapping[int, _Row]) -> _Row:
    first = next(iter(of.values()))
    odd = next((each for each in of.values() if each["state"] != "AVAILABLE"), first)
    return {
        **odd,
        "reason": _one_text({row: each["reason"] for row, each in of.items()}, len(of)),
        "load_seconds": _over((each["load_seconds"] for each in of.values()), max),
        "memory_bytes": _over((each["memory_bytes"] for each in of.values()), sum),
    }


def _one_text(texts: Mapping[int, str], processes: int) -> str:
    """Tell once what all of them say, and else who says what."""
    said = {row: text for row, text in texts.items() if text}
    if len(said) == processes and len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"worker {row}: {text}" for row, text in said.items())


def _over(numbers: Iterable[float | None], join: Callable[[list[float]], float]) -> float | None:
    known = [each for each in numbers if each is not None]
    return join(known) if known else None


def merged_document(told: Mapping[int, _Row]) -> _Row:
    """Make one description of a service of those of some processes, by their numbers."""
    if len(told) == 1:
        return next(iter(told.values()))
    whole = next((each for each in told.values() if "problem" not in each), next(iter(told.values())))
    known = {row: each for row, each in told.items() if "problem" not in each}
    return {**whole, **_row(told), **(merged_figures(known) if known else {})}


def merged_figures(told: Mapping[int, _Row]) -> _Row:
    """Make one of what some processes tell of the nodes, the streams and the sequences of a service."""
    known = {row: each for row, each in told.items() if "problem" not in each}
    if len(told) == 1 or not known:
        return next(iter(told.values()))
    every = list(known.values())
    figures: _Row = {
        "facts": _facts({row: each["facts"] for row, each in known.items()}),
        "nodes": {
            key: _node([each["nodes"][key] for each in every if key in each["nodes"]]) for key in _keys(every, "nodes")
        },
        "streams": _sums(each["streams"] for each in every),
        "waiting": _sums(each["waiting"] for each in every),
    }
    if any("sequences" in each for each in every):
        live = [{**one, "worker": row} for row, each in known.items() for one in each.get("sequences", ())]
        figures["sequences"] = live[:MOST_SEQUENCES]
        figures["sequence_count"] = sum(each.get("sequence_count", 0) for each in every)
    return figures


def _keys(every: Iterable[_Row], of: str) -> list[str]:
    return list(dict.fromkeys(key for each in every for key in each[of]))


def _sums(counted: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in counted:
        for key, number in each.items():
            sums[key] = sums.get(key, 0) + number
    return sums


def _node(tallies: Sequence[_Row]) -> _Row:
    times = no_times()
    for each in tallies:
        for band, count in each["times"].items():
            times[int(band)] += count
    sums = {key: sum(each[key] for each in tallies) for key in ("runs", "failures", "active")}
    return {**sums, "seconds": round(sum(each["seconds"] for each in tallies), 6), **tally_times(times)}


def _facts(told: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Join facts: lists and counts of all, what is the same everywhere once, and the rest by process."""
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for facts in told.values() for key in facts):
        of = {row: facts[key] for row, facts in told.items() if key in facts}
        values = list(of.values())
        if all(isinstance(each, list) for each in values):
            joined[key] = [one for each in values for one in each]
        elif key not in _OF_EACH and all(_is_number(each) for each in values):
            joined[key] = sum(values)
        elif all(each == values[0] for each in values):
            joined[key] = values[0]
        else:
            joined[key] = {f"worker {row}": each for row, each in of.items()}
    return joined


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
