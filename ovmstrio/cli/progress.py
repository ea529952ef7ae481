"""Progress of long steps: bars and spinners on a terminal, and one line for each step in a pipe."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from ovmstrio.cli.console import note, stderr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import TaskID

    from ovmstrio.util.progress import Progress


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yield a callback that shows a bar with sizes for each step; without a known total, the bar pulses."""
    if not stderr().is_terminal:
        yield _progress_lines()
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Bars(TextColumn("{task.description}", markup=False), *columns, console=stderr(), transient=True) as bars:

        def show(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield show


def _progress_lines() -> Progress:
    begun: set[str] = set()
    # Several threads may report steps.
    lock = Lock()

    def show(name: str, done: int, total: int | None) -> None:
        del done
        with lock:
            if name in begun:
                return
            begun.add(name)
        note(name if total is None else f"{name} ({total / 10**6:.1f} MB)", style="")

    return show


@contextmanager
def spinner(name: str) -> Iterator[None]:
    """Show a step of unknown length with its elapsed seconds, or its name as a line in a pipe."""
    if not stderr().is_terminal:
        note(name, style="")
        yield
        return
    from rich.progress import Progress as Bars
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    with Bars(SpinnerColumn(), text, TimeElapsedColumn(), console=stderr(), transient=True) as bars:
        bars.add_task(name, total=None)
        yield
