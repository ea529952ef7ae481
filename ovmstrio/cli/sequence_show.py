"""Output of ``ovms sequence run``: progress bar, JSON lines, summary, and the file of outputs."""

from __future__ import annotations

import json
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final

import numpy as np
import typer

from ovmstrio.cli.console import data_table, print_result, stderr, stdout
from ovmstrio.cli.problems import count, safe
from ovmstrio.cli.tables import Output, plain_rows, print_csv, print_table
from ovmstrio.cli.tensor_output import as_json as as_lists
from ovmstrio.cli.tensor_output import write_outputs
from ovmstrio.core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from rich.table import Table

    from ovmstrio.cli.sequence_run import StepAnswer
    from ovmstrio.core.tensor import Array

_MAX_SHOWN_VALUES: Final = 4
_SUFFIXES: Final = frozenset({".npy", ".npz", ".json"})


@dataclass(slots=True)
class OutputRecorder:
    """Collector of the outputs of all steps for a file; does nothing without a file.

    Attributes:
        file: name of the file.
        axis: axis along which the outputs of the steps are joined; None stacks them along a new first axis.
    """

    file: str = ""
    axis: int | None = None
    _arrays: dict[str, list[Array]] = field(default_factory=dict)

    @classmethod
    def from_options(cls, file: str, axis: int | None) -> OutputRecorder:
        """Return a recorder for the options of a command.

        Raises:
            InvalidRequest: the file has an unknown suffix or no folder, or there is an axis without a file.
        """
        if not file:
            raise InvalidRequest("--join requires --output FILE")
        if Path(file).suffix not in _SUFFIXES:
            raise InvalidRequest(f"--output: expected a file ending in .npy, .npz or .json, got {file!r}")
        if not Path(file).parent.is_dir():
            raise InvalidRequest(f"--output: there is no folder {Path(file).parent}")
        return cls(file, axis)

    def add(self, outputs: dict[str, Array]) -> None:
        """Keep a step's outputs.

        Raises:
            InvalidRequest: an output cannot be joined to the earlier ones, or the file cannot hold several outputs.
        """
        if not self.file:
            return
        if len(outputs) > 1 and self.file.endswith(".npy"):
            raise InvalidRequest(f"{self.file}: the model returns {', '.join(outputs)}; save several outputs as .npz")
        for name, array in outputs.items():
            kept = self._arrays.setdefault(name, [])
            # Join now, to report an error before thousands of further steps.
            self._join(name, [*kept[-1:], array])
            kept.append(array)

    def save(self) -> None:
        """Write the file.

        Raises:
            InvalidRequest: a file of this type cannot hold the outputs.
            OSError: the file cannot be written.
        """
        if self.file:
            write_outputs({name: self._join(name, arrays) for name, arrays in self._arrays.items()}, self.file)

    def _join(self, name: str, arrays: list[Array]) -> Array:
        try:
            return np.stack(arrays) if self.axis is None else np.concatenate(arrays, self.axis)
        except ValueError:
            shapes = " and ".join(str(list(array.shape)) for array in arrays[-2:])
            how = "stacked" if self.axis is None else f"joined along axis {self.axis}"
            raise InvalidRequest(f'output "{name}": {shapes} cannot be {how}; see --join') from None


@dataclass(slots=True)
class _OutputStatistics:
    """Statistics of one output."""

    name: str
    last: Array
    low: float = np.inf
    high: float = -np.inf
    total: float = 0.0
    elements: int = 0

    def add(self, array: Array) -> None:
        """Add the values of a step."""
        self.last = array
        if array.dtype.kind in "biuf" and array.size:
            values = array.astype(np.float64, copy=False)
            self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
            self.total += float(values.sum())
            self.elements += array.size

    def row(self) -> list[str]:
        """Return the row of the summary."""
        kind = "bytes" if self.last.dtype.hasobject else str(self.last.dtype)
        figures = [self.low, self.total / max(1, self.elements), self.high]
        shown = [f"{value:.6g}" for value in figures] if self.elements else ["-"] * len(figures)
        flat = [
            repr(value) if isinstance(value, bytes) else f"{value:.6g}"
            for value in self.last.reshape(-1)[:_MAX_SHOWN_VALUES]
        ]
        more = ", ..." if self.last.size > _MAX_SHOWN_VALUES else ""
        return [safe(each) for each in (self.name, kind, str(list(self.last.shape)), *shown, ", ".join(flat) + more)]


def show(answers: Generator[StepAnswer], number: int, total: int, recorder: OutputRecorder, form: Output) -> None:
    """Show the steps of a sequence as they finish, print a summary, and save the outputs.

    An early end closes ``answers``, which ends the sequence on the server.

    Raises:
        InvalidRequest: outputs cannot be saved in the chosen file.
        ServerError: a step failed.
    """
    figures: dict[str, _OutputStatistics] = {}
    seconds: list[float] = []
    as_json = form is Output.JSON
    began = perf_counter()
    with closing(answers), _bar(total, hidden=as_json and stdout().is_terminal) as advance:
        for answer in answers:
            seconds.append(answer.seconds)
            outputs = dict(answer.outputs)
            for name, array in outputs.items():
                figures.setdefault(name, _OutputStatistics(name, array)).add(array)
            recorder.add(outputs)
            if as_json:
                _print_line(answer, number)
            advance()
    if form is Output.CSV:
        print_csv(plain_rows(_summary_table(list(figures.values()))))
    elif not as_json:
        _print_summary(list(figures.values()), number, seconds, perf_counter() - began)
    recorder.save()


def _print_line(answer: StepAnswer, number: int) -> None:
    line = {
        "step": answer.step,
        "sequence_id": number,
        "milliseconds": round(answer.seconds * 1e3, 3),
        "outputs": as_lists(answer.outputs),
    }
    typer.echo(json.dumps(line))


def _summary_table(figures: list[_OutputStatistics]) -> Table:
    table = data_table("output", "type", "shape", "lowest", "mean", "highest", "last step")
    for each in figures:
        table.add_row(*each.row())
    return table


def _print_summary(figures: list[_OutputStatistics], number: int, seconds: list[float], elapsed: float) -> None:
    print_table(_summary_table(figures))
    median, late, worst = np.percentile(np.array(seconds) * 1e3, [50, 99, 100])
    print_result(
        f"{count(len(seconds), 'step')} in {elapsed:.2f} s, {len(seconds) / elapsed:.0f} steps/s; ms a step: "
        f"median {median:.2f}, p99 {late:.2f}, max {worst:.2f}; sequence {number} has ended"
    )


@contextmanager
def _bar(total: int, *, hidden: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar on terminals; yield a function that advances it by a step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
    from rich.text import Text

    class Speed(ProgressColumn):
        """Column of the steps per second."""

        def render(self, task: Task) -> Text:
            return Text("" if task.speed is None else f"{task.speed:.0f} steps/s", style="progress.data.speed")

    columns = (BarColumn(), MofNCompleteColumn(), Speed(), TimeRemainingColumn())
    with Progress(*columns, console=stderr(), transient=True, disable=hidden or not stderr().is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
