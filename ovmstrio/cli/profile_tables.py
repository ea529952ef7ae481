"""Tables of a profile: threads, their functions, and layers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.cli.console import data_table
from ovmstrio.cli.problems import safe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.table import Table

HEADER: Final = ("where", "what", "place", "own_percent", "total_percent", "microseconds")
"""The columns of :func:`profile_rows`."""

_MOST_ROWS: Final = 12
_MICROSECONDS: Final = 1e6


def named(report: Mapping[str, Any], name: str) -> str:
    """Prefix a name with its process and worker, in a server of several processes."""
    whose = f"process {report['process']} of {report['service']}: {name}" if "process" in report else name
    return f"worker {report['worker']}: {whose}" if "worker" in report else whose


def profile_tables(report: Mapping[str, Any]) -> Iterator[tuple[str, Table | None]]:
    """Yield the titles and tables of a server's profile; a title may have no table."""
    yield _threads(report)
    for threads in report["threads"]:
        if threads["stacks"]:
            yield _functions(report, threads)
    for worker in report.get("silent", ()):
        yield f"Worker {worker} did not answer in time and is not included", None
    for process in report["processes"]:
        if process["problem"]:
            pid, why = process["pid"], process["problem"]
            hint = f"py-spy may sample it: py-spy record --gil --pid {pid} -o FILE"
            yield f"Process {pid} of {safe(process['service'])} was not sampled: {safe(why)}; {hint}", None
    for model in report["models"]:
        yield _layers(model)


def profile_rows(report: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    """Yield a row for each function of each kind of thread, in percent of its samples, and for each layer."""
    for threads in report["threads"]:
        own, total = _counts(threads)
        for number, count in total.most_common():
            frame = report["frames"][number]
            shares = (round(100 * each / threads["samples"], 3) for each in (own[number], count))
            yield named(threads, threads["name"]), frame["name"], f"{frame['file']}:{frame['line']}", *shares, ""
    for model in report["models"]:
        for layer, share in _shares(model):
            times = round(100 * share, 3), "", round(layer["seconds"] * _MICROSECONDS, 3)
            yield model["name"], layer["name"], f"{layer['type']} {layer['runs_as']}", *times


def _threads(report: Mapping[str, Any]) -> tuple[str, Table]:
    table = data_table("threads", "processor", "waiting")
    for threads in report["threads"]:
        cpu = "" if threads["cpu_seconds"] is None else f"{threads['cpu_seconds']:.2f} s"
        waiting = threads["waiting"] / max(1, threads["samples"])
        table.add_row(safe(named(threads, threads["name"])), cpu, f"{waiting:.0%}")
    for process in report.get("workers", [report]):
        name = named(process, "OpenVINO and other native threads")
        table.add_row(safe(name), f"{process['native_cpu_seconds']:.2f} s", "")
    for process in report["processes"]:
        name = named(process, f"process {process['pid']} of {process['service']}")
        table.add_row(safe(name), f"{process['cpu_seconds']:.2f} s", "not sampled" if process["problem"] else "")
    title = f"[bold]{report['seconds']:.2f} s, CPU time of the server: {report['cpu_seconds']:.2f} s[/]"
    return title, table


def _functions(report: Mapping[str, Any], threads: Mapping[str, Any]) -> tuple[str, Table]:
    own, total = _counts(threads)
    table = data_table("own", "total", "function", "place")
    for number, count in own.most_common(_MOST_ROWS):
        frame = report["frames"][number]
        shares = (f"{each / threads['samples']:.1%}" for each in (count, total[number]))
        table.add_row(*shares, safe(frame["name"]), safe(f"{Path(frame['file']).name}:{frame['line']}"))
    return f"[bold]{safe(named(threads, threads['name']))}[/]: {threads['samples']} samples", table


def _counts(threads: Mapping[str, Any]) -> tuple[Counter[int], Counter[int]]:
    """Count the samples with each function as the innermost frame, and with each function in any frame."""
    own: Counter[int] = Counter()
    total: Counter[int] = Counter()
    for stack in threads["stacks"]:
        own[stack["frames"][-1]] += stack["samples"]
        for number in set(stack["frames"]):
            total[number] += stack["samples"]
    return own, total


def _layers(model: Mapping[str, Any]) -> tuple[str, Table | None]:
    name = f"[bold]{safe(model['name'])}[/]"
    if "layers" not in model:
        return f"{name}: {safe(model['problem'])}", None
    title = (
        f"{name}: layers of an inference of {model['seconds'] * _MICROSECONDS:.0f} us, {model['runs']} runs on ones; "
        f"{model['calls']} calls while sampling"
    )
    table = data_table("share", "time", "layer", "type", "runs as")
    shares = sorted(_shares(model), key=lambda each: -each[1])
    for layer, share in shares[:_MOST_ROWS]:
        texts = safe(layer["name"]), safe(layer["type"]), safe(layer["runs_as"])
        table.add_row(f"{share:.1%}", f"{layer['seconds'] * _MICROSECONDS:.1f} us", *texts)
    if len(shares) > _MOST_ROWS:
        rest = sum(share for _, share in shares[_MOST_ROWS:])
        table.add_row(f"{rest:.1%}", "", f"{len(shares) - _MOST_ROWS} others", "", "")
    return title, table


def _shares(model: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], float]]:
    layers = model.get("layers", ())
    total = sum(layer["seconds"] for layer in layers) or 1.0
    for layer in layers:
        yield layer, layer["seconds"] / total
