"""Program of a worker process that aborts when it loads its second model."""

from __future__ import annotations

import os

from ovmstrio.isolation.worker_program import WorkRequest, WorkRequests, exit_now, run_program

__all__: list[str] = []


async def _serve(first: WorkRequest, requests: WorkRequests) -> None:
    await first.answer(None)
    loads = 0
    while (request := await requests.next()) is not None:
        loads += request.value["operation"] == "load"
        if loads == 2:
            os.abort()
        await request.answer(None)


if __name__ == "__main__":
    run_program(_serve)
    exit_now()
