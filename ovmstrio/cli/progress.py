"""Progress of long steps: bars and spinners on a terminal, and one line for each step in a pipe."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from ovmstrio.cli.console import messages_are_rich, print_message, stderr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress as Bars
    from rich.progress import Task, TaskID

    from ovmstrio.util.progress import Progress


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yield a callback that shows a bar with sizes for each step; without a known total, the bar pulses.

    The callback may be called in any thread.
    """
    if not messages_are_rich():
        yield _progress_lines()
        return
    tasks: dict[str, TaskID] = {}
    lock = Lock()
    with ExitStack() as opened:
        bars: Bars | None = None

        def show(name: str, done: int, total: int | None) -> None:
            nonlocal bars
            with lock:
                # Most starts have no such step, and need no import of rich.
                bars = opened.enter_context(_make_bars()) if bars is None else bars
                if name not in tasks:
                    tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield show


def _make_bars() -> Bars:
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Sizes(DownloadColumn):
        """Sizes of a download; nothing for a step without bytes."""

        def render(self, task: Task) -> Text:
            return super().render(task) if task.total or task.completed else Text()

    columns = (BarColumn(), Sizes(), TransferSpeedColumn(), TimeElapsedColumn())
    return Bars(TextColumn("{task.description}", markup=False), *columns, console=stderr(), transient=True)


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
        print_message(name if total is None else f"{name} ({total / 10**6:.1f} MB)", style="")

    return show


@contextmanager
def spinner(name: str) -> Iterator[Callable[[str], None]]:
    """Show a task of unknown length with its step and elapsed seconds, in a pipe a line for each step.

    Yields:
        The function that begins a step.
    """
    if not messages_are_rich():
        yield lambda step: print_message(f"{name}: {step}", style="")
        return
    from rich.progress import Progress as Bars
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    with Bars(SpinnerColumn(), text, TimeElapsedColumn(), console=stderr(), transient=True) as bars:
        task = bars.add_task(name, total=None)
        yield lambda step: bars.update(task, description=f"{name}: {step}")
