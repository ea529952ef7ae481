"""Main program of a custom node's worker process.

The first request describes the node to open; each later request is a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import trio

from ovmstrio.core.errors import ConfigError, ServerError
from ovmstrio.isolation.worker_program import WorkRequest, WorkRequests, exit_now, run_program
from ovmstrio.pipelines.custom_node import ItemInfo
from ovmstrio.pipelines.native.node import NativeNode, open_native_node
from ovmstrio.telemetry.logs import forward_logs


async def _serve(first: WorkRequest, requests: WorkRequests) -> None:
    path, name, params = (first.value[key] for key in ("path", "name", "params"))
    forward_logs(requests.log_forwarder())
    async with trio.open_nursery() as tasks:
        try:
            node = await open_native_node(Path(path), name, params, tasks=tasks)
        except ConfigError as error:
            await first.answer({"problems": [asdict(problem) for problem in error.problems]})
            return
        try:
            await first.answer({"inputs": _rows(node.inputs), "outputs": _rows(node.outputs)})
            await requests.handle_all(partial(_answer, node))
        finally:
            await node.aclose()


def _rows(items: Mapping[str, ItemInfo]) -> list[tuple[str, str | None, tuple[int, ...]]]:
    return [(item.name, None if item.datatype is None else item.datatype.name, item.shape) for item in items.values()]


async def _answer(node: NativeNode, request: WorkRequest) -> None:
    try:
        outputs = await node.execute(request.value)
    except ServerError as error:
        await request.answer(error.message)
    else:
        await request.answer(outputs)


def main() -> None:
    """Serve requests from the server whose socket descriptor is the first argument."""
    run_program(_serve)
    exit_now()


if __name__ == "__main__":
    main()
