"""The process in which a handler is tried; it writes down what it found, and ends whatever the handler started."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.observability.logs import configure_logs
from ovmstrio.runtimes.handlers.building import HandlerBuilder, Supplies
from ovmstrio.runtimes.handlers.config.project_file import read_project
from ovmstrio.runtimes.handlers.config.specs import ProjectSpec
from ovmstrio.runtimes.handlers.grpc.services import open_proto
from ovmstrio.runtimes.handlers.handler_class import import_folders, on_sys_path
from ovmstrio.runtimes.handlers.handler_code import HandlerCode
from ovmstrio.work.threads.worker_threads import WorkerThreads

__all__: list[str] = []


async def _problems(project: ProjectSpec) -> list[Problem]:
    try:
        if project.protobuf_path is None:
            await _check(project, Supplies({}, None, {}, ()))
        else:
            async with open_proto(project.protobuf_path, project.directory) as proto:
                names = tuple(rpc.name for rpc in proto.rpcs)
                await _check(project, Supplies({}, proto.module, proto.modules, names))
    except ConfigError as error:
        return list(error.problems)
    return []


async def _check(project: ProjectSpec, supplies: Supplies) -> None:
    failure: ConfigError | None = None
    threads = WorkerThreads(limit=1, idle_seconds=None, is_strict=True)
    code = HandlerCode(project.name, project.directory)
    with on_sys_path(import_folders(project)), HandlerBuilder(project, supplies, code, threads) as builder:
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(threads.run)
                await builder.load()
            except ConfigError as error:
                # Raised outside, so that it does not come in a group.
                failure = error
            finally:
                with trio.CancelScope(shield=True):
                    await threads.aclose()
    if failure is not None:
        raise failure


def _main() -> None:
    file, report = Path(sys.argv[1]), Path(sys.argv[2])
    configure_logs(level="ERROR")
    project, _ = read_project(file)
    os.chdir(project.directory)
    os.environ.update(project.environment)
    problems = trio.run(_problems, project)
    unfinished = report.with_suffix(".part")
    unfinished.write_text(json.dumps([asdict(problem) for problem in problems]), encoding="utf-8")
    unfinished.replace(report)
    # Threads that the handler started may go on for ever.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
