"""Timeline analysis: average stage times, Op throughput, suggested concurrency and Chrome traces."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, overload

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.ops.config_file import read_document, read_pipeline_config
from ovmstrio.ops.settings import PipelineSettings
from ovmstrio.util.regular_files import read_regular_text

_LINE: Final = re.compile(r"PROFILE\tpid:(\d+)\t(.*)")
_MARK: Final = re.compile(r"(\S+)#(\S+)_([01]):(\d+)")
_OP: Final = re.compile(r"\[(.+)\|(.+)\]")
_MS: Final = 1e3
_STAGES: Final = frozenset({"prep", "midp", "postp"})


@dataclass(frozen=True, slots=True)
class _TimeMark:
    stage: str
    where: str
    is_end: bool
    at: int
    pid: int


class Analyst:
    """Reader of a file with timelines, such as the standard error of a server with ``use_profile``."""

    def __init__(self, profile_file: str | Path) -> None:
        self._file = Path(profile_file)
        self._marks: list[_TimeMark] | None = None

    def get_trace(self) -> list[dict[str, Any]]:
        """Return begin and end events in Chrome's trace format; raises ConfigError if the file cannot be read."""
        return [
            {"name": mark.stage, "tid": mark.where, "pid": mark.pid, "ts": mark.at, "ph": "E" if mark.is_end else "B"}
            for mark in self._read()
        ]

    def save_trace(self, trace_file: str | Path) -> None:
        """Write the events to a file for Chrome's or Perfetto's viewer."""
        Path(trace_file).write_text(json.dumps(self.get_trace(), indent=2), encoding="utf-8")

    def get_profile(self) -> dict[str, float]:
        """Return the average milliseconds of a call, of unpacking and of packing."""
        spent: dict[str, list[int]] = {"call": [], "prepack": [], "postpack": []}
        for mark, microseconds in _spans(self._read()):
            kind = mark.stage.partition("_")[0]
            if kind in spent:
                spent[kind].append(microseconds)
        return {kind: sum(times) / len(times) / _MS for kind, times in spent.items() if times}

    def print_profile(self) -> None:
        """Print the averages."""
        for kind, milliseconds in self.get_profile().items():
            print(f"{kind}: {milliseconds:.3f} ms")  # noqa: T201 - prints by contract

    def get_op_analyst(self) -> OpAnalyst:
        """Return the average stage times of the Ops."""
        spent: dict[str, dict[str, list[int]]] = {}
        for mark, microseconds in _spans(self._read()):
            if match := _OP.fullmatch(mark.where):
                spent.setdefault(match[1], {}).setdefault(mark.stage, []).append(microseconds)
        return OpAnalyst(
            {op: {stage: sum(t) / len(t) / _MS for stage, t in each.items()} for op, each in spent.items()}
        )

    def _read(self) -> list[_TimeMark]:
        if self._marks is None:
            try:
                text = read_regular_text(self._file, errors="replace", max_bytes=None)
            except OSError as error:
                problem = Problem(f"cannot be read: {error.strerror or error}", str(self._file))
                raise ConfigError([problem]) from None
            self._marks = [mark for line in _LINE.finditer(text) for mark in _parse_line(int(line[1]), line[2])]
        return self._marks


class OpAnalyst:
    """Analysis of the average stage times of Ops, in milliseconds by Op and stage."""

    def __init__(self, times: Mapping[str, Mapping[str, float]]) -> None:
        self._times = {op: dict(stages) for op, stages in times.items()}

    @overload
    def times(self, op_name: None = None) -> dict[str, dict[str, float]]: ...

    @overload
    def times(self, op_name: str) -> dict[str, float]: ...

    def times(self, op_name: str | None = None) -> dict[str, dict[str, float]] | dict[str, float]:
        """Return milliseconds by stage of an Op, or by Op and stage; KeyError for an unknown Op."""
        if op_name is not None:
            return dict(self._times[op_name])
        return {op: dict(stages) for op, stages in self._times.items()}

    @overload
    def qps(self, op_name: None = None) -> dict[str, dict[str, float]]: ...

    @overload
    def qps(self, op_name: str) -> dict[str, float]: ...

    def qps(self, op_name: str | None = None) -> dict[str, dict[str, float]] | dict[str, float]:
        """Return samples per second of one worker by stage of an Op, or by Op and stage; KeyError for an unknown Op."""
        rates = {
            op: {stage: _MS / time if time else math.inf for stage, time in stages.items()}
            for op, stages in self._times.items()
        }
        return rates if op_name is None else rates[op_name]

    def concurrency_analysis(self, op_config_yaml: str | Path) -> dict[str, int]:
        """Return the ``concurrency`` with which each Op keeps up with the fastest model on its device.

        The file is a ``config.yml``, or has the devices of stages, such as ``cnn: {midp: "1,2"}``.
        With the latter each Op keeps up with the slowest of these stages.

        Raises:
            ConfigError: the file is unusable, or two models share a device, which makes their times meaningless.
        """
        rates = {op: _MS / total for op, stages in self._times.items() if (total := sum(stages.values()))}
        root, _ = read_document(Path(op_config_yaml))
        if root.members and all(each.members and {*each.members} <= _STAGES for each in root.members.values()):
            target = self._rate_of_stages(root.plain(), str(op_config_yaml))
            return {op: max(1, -int(-target // rate)) for op, rate in rates.items()}
        settings = read_pipeline_config(op_config_yaml)
        _check_devices(settings)
        models = [
            rate * max(1, len(settings.op(op).local_service_conf.device_ids))
            for op, rate in rates.items()
            if settings.op(op).has_model
        ]
        target = max(models, default=max(rates.values(), default=0.0))
        return {op: max(1, -int(-target // rate)) for op, rate in rates.items()}

    def _rate_of_stages(self, devices: Mapping[str, Mapping[str, Any]], file: str) -> float:
        """Return the samples per second of the slowest stage on its devices; raises ConfigError."""
        unknown = [
            f"{op}: {stage}"
            for op, stages in devices.items()
            for stage in stages
            if not self._times.get(op, {}).get(stage)
        ]
        if unknown:
            known = ", ".join(f"{op}: {stage}" for op, stages in self._times.items() for stage in stages)
            message = "the timelines lack a stage of the file"
            raise ConfigError([Problem(message, file, expected=known or "no stage", found=", ".join(unknown))])
        listed = {
            (op, stage): [each.strip() for each in str(given).split(",")]
            for op, stages in devices.items()
            for stage, given in stages.items()
        }
        _check_users(((op, each) for (op, _), numbers in listed.items() for each in numbers), file)
        return _MS / max(self._times[op][stage] / len(numbers) for (op, stage), numbers in listed.items())


def _check_devices(settings: PipelineSettings) -> None:
    used = (
        (name, device)
        for name, op in settings.ops.items()
        for device in (op.local_service_conf.device_ids if op.has_model else ())
    )
    _check_users(used, str(settings.source or ""))


def _check_users(used: Iterable[tuple[str, str]], file: str) -> None:
    users: dict[str, list[str]] = {}
    for name, device in used:
        users.setdefault(device, []).append(name)
    problems = [
        Problem(
            f"device {device} has several models: {', '.join(names)}",
            file,
            suggestion="use one device per model for the analysis",
        )
        for device, names in users.items()
        if len(names) > 1
    ]
    if problems:
        raise ConfigError(problems)


def _parse_line(pid: int, text: str) -> Iterator[_TimeMark]:
    for part in text.split(" "):
        if match := _MARK.fullmatch(part):
            yield _TimeMark(match[1], match[2], match[3] == "1", int(match[4]), pid)


def _spans(marks: list[_TimeMark]) -> Iterator[tuple[_TimeMark, int]]:
    open_marks: dict[tuple[int, str, str], list[_TimeMark]] = {}
    for mark in marks:
        key = (mark.pid, mark.stage, mark.where)
        if not mark.is_end:
            open_marks.setdefault(key, []).append(mark)
        elif open_marks.get(key):
            begin = open_marks[key].pop(0)
            yield begin, mark.at - begin.at
