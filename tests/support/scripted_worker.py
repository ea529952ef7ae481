"""Program of a worker process that executes the commands of a test: echo, log, hang, exit, die."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any

import trio

from ovmstrio.isolation.worker_program import WorkRequest, WorkRequests, exit_now, run_program

PROGRAM = "tests.support.scripted_worker"


def _log(level: int, text: str, fields: dict[str, Any], count: int = 1) -> None:
    for number in range(count):
        logging.getLogger("worker.code").log(level, text.replace("NUMBER", str(number)), extra=fields, stacklevel=2)


async def _handle(request: WorkRequest) -> None:
    match request.value:
        case ["echo", value]:
            await request.answer(value)
        case ["late", seconds, value]:
            await trio.sleep(seconds)
            await request.answer(value)
        case ["write", descriptor, text]:
            os.write(descriptor, text.encode())
            await request.answer(None)
        case ["log", *arguments]:
            _log(*arguments)
            await request.answer(None)
        case ["hang"]:
            await trio.sleep_forever()
        case ["die", number]:
            os.kill(os.getpid(), number)
        case ["junk"]:
            os.write(int(sys.argv[1]), b"no message")
        case ["twice"]:
            await request.answer(1)
            await request.answer(2)
        case None if request.descriptor is not None:
            os.write(request.descriptor, str(os.getpid()).encode())
            os.close(request.descriptor)


async def _serve(first: WorkRequest, requests: WorkRequests) -> None:
    what: Any = first.value
    if what == "leave":
        return
    if what == "exit":
        sys.exit(3)
    if first.descriptor is not None:
        os.close(first.descriptor)
    logging.getLogger().addHandler(requests.log_forwarder())
    await first.answer([what, os.getpid(), os.getpgid(0)])
    await requests.handle_all(_handle)


def main() -> None:
    signal.alarm(60)
    run_program(_serve)
    exit_now()


if __name__ == "__main__":
    main()
