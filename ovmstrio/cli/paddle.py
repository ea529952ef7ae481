"""``ovms paddle``: commands for services of Paddle Serving."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.cli import run, stop, trace
from ovmstrio.cli.commands import App

if TYPE_CHECKING:
    import typer


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = App(help="Run, stop and watch services of Paddle Serving.")
    for module in (run, stop, trace):
        module.register(group)
    app.add_typer(group, name="paddle")
