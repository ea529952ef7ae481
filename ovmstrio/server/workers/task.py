"""What a process that is to serve a plan with others is told, and what it tells by its end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

if TYPE_CHECKING:
    from ovmstrio.server.plan import Plan

__all__ = ["CUT", "DRAIN", "WorkerTask"]

CUT: Final = 3
"""The exit code of a process that had to cut requests, which its own log tells of."""


DRAIN: Final = "drain"
"""What a process is told when the server begins to drain; until it is dismissed it is given further connections."""


class WorkerTask(BaseModel):
    """What a worker process is told, and the board's descriptor with it."""

    file: Path
    options: dict[str, Any]
    rows: int
    row: int

    @classmethod
    def of(cls, plan: Plan, rows: int, row: int) -> WorkerTask:
        """Make the task of one process of a project's plan."""
        options = plan.settings.model_dump(mode="json", exclude_unset=True)
        return cls(file=Path(plan.spec.services[0].origin), options=options, rows=rows, row=row)
