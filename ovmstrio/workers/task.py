"""Messages between the supervisor and a worker process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

if TYPE_CHECKING:
    from ovmstrio.server.plan import Plan

EXIT_CUT: Final = 3
"""Exit code after requests were cancelled at the drain timeout."""


DRAIN: Final = "drain"
"""Message of the parent at the start of a drain; connections may still follow."""


CHANGED: Final = "changed"
"""Message about a changed readiness, from a worker to the parent and from there to all workers."""


class WorkerTask(BaseModel):
    """Start message of a worker, sent with the descriptor of the shared state.

    Attributes:
        file: file of a project that is served alone, or None.
        secret: shared secret of the workers.
        reason: reason of an automatic number of workers.
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
        """Create the task of one worker of a plan."""
        options = plan.settings.model_dump(mode="json", exclude_unset=True)
        file = Path(plan.spec.services[0].origin) if plan.root else None
        if file is None:
            options["workers"] = rows
        arguments: dict[str, Any] = {"search_path": sys.path, "reason": plan.workers_reason}
        return cls(file=file, options=options, rows=rows, row=row, secret=secret, **arguments)
