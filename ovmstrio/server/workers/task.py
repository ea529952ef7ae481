"""What a process that is to serve a plan with others is told, and what it tells by its end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

if TYPE_CHECKING:
    from ovmstrio.server.plan import Plan

__all__ = ["CHANGED", "CUT", "DRAIN", "WorkerTask"]

CUT: Final = 3
"""The exit code of a process that had to cut requests, which its own log tells of."""


DRAIN: Final = "drain"
"""What a process is told when the server begins to drain; until it is dismissed it is given further connections."""


CHANGED: Final = "changed"
"""What a process tells when its readiness has changed, and what the others are told then."""


class WorkerTask(BaseModel):
    """What a worker process is told, and the board's descriptor with it.

    Attributes:
        file: of a project that is served alone; None where the options say what is served.
        options: of the command line.
        rows: how many processes there are.
        row: the number of this one.
        secret: what all of them know, and nobody else.
        search_path: where the parent imports from.
        reason: why there are so many, where nobody has said how many there are to be.
    """

    file: Path | None
    options: dict[str, Any]
    rows: int
    row: int
    secret: str
    search_path: list[str] = []
    reason: str = ""

    @classmethod
    def of(cls, plan: Plan, rows: int, row: int, secret: str) -> WorkerTask:
        """Make the task of one process of a plan."""
        options = plan.settings.model_dump(mode="json", exclude_unset=True)
        file = Path(plan.spec.services[0].origin) if plan.root else None
        if file is None:
            options["workers"] = rows
        told: dict[str, Any] = {"search_path": sys.path, "reason": plan.workers_reason}
        return cls(file=file, options=options, rows=rows, row=row, secret=secret, **told)
