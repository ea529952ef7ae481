"""What timelines say: where the time of requests goes, how fast each Op can be, and a trace for Chrome's viewer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.ops.config_file import read_pipeline_config
from ovmstrio.ops.settings import OpSettings, PipelineSettings
from ovmstrio.util.regular_files import read_regular_text

__all__ = ["Analyst", "OpAnalyst"]

_LINE: Final = re.compile(r"PROFILE\tpid:(\d+)\t(.*)")
_MARK: Final = re.compile(r"(\S+)#(\S+)_([01]):(\d+)")
_OP: Final = re.compile(r"\[(.+)\|(.+)\]")
_MS: Final = 1e3


@dataclass(frozen=True, slots=True)
class _Mark:
    """The begin or end of a stage, in microseconds."""

    stage: str
    where: str
    is_end: bool
    at: int
    pid: int


class Analyst:
    """Reads the timelines of a file, such as the captured standard error of a server with ``use_profile``.

    Args:
        profile_file: the file; lines that are no timelines are passed over.
    """

    def __init__(self, profile_file: str | Path) -> None:
        self._file = Path(profile_file)
        self._marks: list[_Mark] | None = None

    def get_trace(self) -> list[dict[str, Any]]:
        """Give the events of Chrome's trace format, one for each begin and each end.

        Raises:
            ConfigError: the file cannot be read.
        """
        return [
            {"name": mark.stage, "tid": mark.where, "pid": mark.pid, "ts": mark.at, "ph": "E" if mark.is_end else "B"}
            for mark in self._read()
        ]

    def save_trace(self, trace_file: str | Path) -> None:
        """Write the events to a file, which Chrome's and Perfetto's viewers open."""
        Path(trace_file).write_text(json.dumps(self.get_trace(), indent=2), encoding="utf-8")

    def get_profile(self) -> dict[str, float]:
        """Give averages in milliseconds: of the whole call, and of unpacking and packing."""
        spent: dict[str, list[int]] = {"call": [], "prepack": [], "postpack": []}
        for mark, took in _spans(self._read()):
            kind = mark.stage.partition("_")[0]
            if kind in spent:
                spent[kind].append(took)
        return {kind: sum(times) / len(times) / _MS for kind, times in spent.items() if times}

    def print_profile(self) -> None:
        """Print the averages."""
        for kind, milliseconds in self.get_profile().items():
            print(f"{kind}: {milliseconds:.3f} ms")  # noqa: T201 - it is called to print

    def get_op_analyst(self) -> OpAnalyst:
        """Give what there is to say of each Op."""
        spent: dict[str, dict[str, list[int]]] = {}
        for mark, took in _spans(self._read()):
            if found := _OP.fullmatch(mark.where):
                spent.setdefault(found[1], {}).setdefault(mark.stage, []).append(took)
        return OpAnalyst(
            {op: {stage: sum(t) / len(t) / _MS for stage, t in each.items()} for op, each in spent.items()}
        )

    def _read(self) -> list[_Mark]:
        if self._marks is None:
            try:
                text = read_regular_text(self._file, errors="replace", max_bytes=None)
            except OSError as error:
                problem = Problem(f"cannot be read: {error.strerror or error}", str(self._file))
                raise ConfigError([problem]) from None
            self._marks = [mark for line in _LINE.finditer(text) for mark in _of_line(int(line[1]), line[2])]
        return self._marks


class OpAnalyst:
    """What the averages of the Ops' stages say.

    Args:
        times: milliseconds by Op and stage.
    """

    def __init__(self, times: Mapping[str, Mapping[str, float]]) -> None:
        self._times = {op: dict(stages) for op, stages in times.items()}

    def times(self) -> dict[str, dict[str, float]]:
        """Give milliseconds by Op and stage."""
        return {op: dict(stages) for op, stages in self._times.items()}

    def qps(self, op_concurrency: Mapping[str, int] | None = None) -> dict[str, float]:
        """Give how many samples a second each Op can do, with so many workers or with one."""
        workers = op_concurrency or {}
        return {
            op: _MS / total * workers.get(op, 1)
            for op, stages in self._times.items()
            if (total := sum(stages.values()))
        }

    def concurrency_analysis(self, op_config_yaml: str | Path) -> dict[str, int]:
        """Suggest each Op's ``concurrency``: as many workers as keep up with the fastest model on its device.

        Raises:
            ConfigError: the file cannot be used, or has two models on one device, whose times say nothing then.
        """
        settings = read_pipeline_config(op_config_yaml)
        _check_devices(settings)
        rates = self.qps()
        models = [rates[op] * _devices(settings.op(op)) for op in rates if settings.op(op).has_model]
        target = max(models, default=max(rates.values(), default=0.0))
        return {op: max(1, -int(-target // rate)) for op, rate in rates.items()}


def _devices(op: OpSettings) -> int:
    return max(1, len(op.local_service_conf.device_ids))


def _check_devices(settings: PipelineSettings) -> None:
    users: dict[str, list[str]] = {}
    for name, op in settings.ops.items():
        for device in op.local_service_conf.device_ids if op.has_model else ():
            users.setdefault(device, []).append(name)
    problems = [
        Problem(
            f"device {device} has several models: {', '.join(names)}",
            str(settings.source or ""),
            suggestion="give each model a device of its own for the analysis",
        )
        for device, names in users.items()
        if len(names) > 1
    ]
    if problems:
        raise ConfigError(problems)


def _of_line(pid: int, text: str) -> Iterator[_Mark]:
    for part in text.split(" "):
        if found := _MARK.fullmatch(part):
            yield _Mark(found[1], found[2], found[3] == "1", int(found[4]), pid)


def _spans(marks: list[_Mark]) -> Iterator[tuple[_Mark, int]]:
    """Give each stage with its microseconds; a begin belongs to the next end of the same name."""
    begun: dict[tuple[int, str, str], list[_Mark]] = {}
    for mark in marks:
        key = (mark.pid, mark.stage, mark.where)
        if not mark.is_end:
            begun.setdefault(key, []).append(mark)
        elif begun.get(key):
            begin = begun[key].pop(0)
            yield begin, mark.at - begin.at
