"""Custom nodes in shared libraries, each in a worker process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
import trio

from ovmstrio.core.errors import ConfigError, CustomNodeFailure, Problem
from ovmstrio.core.tensor import BY_NAME, Array
from ovmstrio.isolation.worker_process import WorkerExited, WorkerProcess
from ovmstrio.pipelines.custom_node import MAX_CONCURRENT_CALLS, ItemInfo
from ovmstrio.pipelines.native.library import NodeIdentity, remove_leftovers
from ovmstrio.pipelines.native.node import check_dtypes
from ovmstrio.util.backoff import Backoff

GRACE_SECONDS: Final = 5.0
"""Time limit for abandoned calls and for closing, before the process is killed."""

_SECONDS_BETWEEN_STARTS: Final = 1.0
"""Time during which calls fail immediately after a failed start of the process."""

_PROGRAM: Final = "ovmstrio.pipelines.native.node_program"

log = structlog.get_logger(__name__)


class IsolatedNode:
    """A custom node in a worker process, created by :func:`open_isolated_node`; see :class:`CustomNode`.

    A crashed process is replaced at once; calls use the new process or wait for it.
    """

    def __init__(
        self, identity: NodeIdentity, params: Mapping[str, str], nursery: trio.Nursery, grace_seconds: float
    ) -> None:
        self.identity = identity
        self.inputs: Mapping[str, ItemInfo] = {}
        self.outputs: Mapping[str, ItemInfo] = {}
        self._params = params
        self._nursery = nursery
        self._grace_seconds = grace_seconds
        self._starting = trio.Lock()
        self._worker: WorkerProcess | None = None
        self._workers: set[WorkerProcess] = set()
        self._is_closed = False
        self._failure = ""
        self._next_start = 0.0
        self._backoff = Backoff(_SECONDS_BETWEEN_STARTS, _SECONDS_BETWEEN_STARTS)

    @property
    def pid(self) -> int | None:
        """Process id of the current worker process, if there is one."""
        return None if self._worker is None else self._worker.pid

    async def execute(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the node once; calls may overlap. Inputs are copied to the process, outputs are copied once.

        Cancellation returns at once. After ``grace_seconds`` the process is replaced, and killed when no other call
        needs it.
        """
        check_dtypes(self.identity, inputs)
        while True:
            worker = await self._usable_worker()
            try:
                outputs: str | dict[str, Array] = await worker.call(dict(inputs))
            except WorkerExited as end:
                if end.was_called:
                    raise CustomNodeFailure(self._crashed(end.why)) from end
                continue
            except OSError as error:
                raise CustomNodeFailure(f"{self.identity}: the inputs cannot be sent ({error})") from error
            if isinstance(outputs, str):
                raise CustomNodeFailure(outputs)
            if not _are_arrays(outputs):
                worker.kill_for_violation(TypeError("outputs are not arrays"))
                await worker.ended.wait()
                raise CustomNodeFailure(self._crashed(worker.why))
            return outputs

    def _crashed(self, reason: str) -> str:
        failure = f"{self.identity}: its process {reason}"
        return f"Custom node failed during execution; {failure} (NODE_LIBRARY_EXECUTION_FAILED)"

    async def aclose(self) -> None:
        """Deinitialize the node and end its process, by force after ``grace_seconds``; shielded."""
        self._is_closed = True
        for worker in self._workers:
            if worker is not self._worker:
                worker.kill()
        with trio.CancelScope(shield=True):
            if self._worker is not None:
                await self._worker.close(self._grace_seconds)
            for worker in list(self._workers):
                await worker.ended.wait()

    # Processes

    async def open(self) -> None:
        """Start the first process."""
        worker, opened = await self._start()
        self.inputs, self.outputs = _items(opened["inputs"]), _items(opened["outputs"])
        self._worker = worker

    async def _usable_worker(self) -> WorkerProcess:
        async with self._starting:
            if self._is_closed:
                raise CustomNodeFailure(f"{self.identity} is closed")
            if self._worker is None or self._worker.is_retired:
                self._worker = None
                if trio.current_time() < self._next_start:
                    raise CustomNodeFailure(self._failure)
                self._worker = await self._restart()
            return self._worker

    async def _restart(self) -> WorkerProcess:
        try:
            worker, _ = await self._start()
        except ConfigError as error:
            self._failure = f"{self.identity} cannot be restarted: {error.message}"
            self._next_start = trio.current_time() + self._backoff.seconds_after()
            raise CustomNodeFailure(self._failure) from error
        log.info("custom node process started", node=str(self.identity), pid=worker.pid)
        return worker

    async def _start(self) -> tuple[WorkerProcess, dict[str, Any]]:
        def stuck() -> None:
            log.warning("custom node process replaced: call does not end", node=str(self.identity), pid=worker.pid)

        worker = WorkerProcess(
            _PROGRAM,
            max_concurrent_calls=MAX_CONCURRENT_CALLS,
            grace_seconds=self._grace_seconds,
            on_stuck=stuck,
            kills_group=True,
            log_fields={"node": self.identity.name},
        )
        self._workers = {worker, *(one for one in self._workers if not one.ended.is_set())}
        first = {"path": str(self.identity.path), "name": self.identity.name, "params": dict(self._params)}
        try:
            opened = await worker.start(self._nursery, first, on_exit=partial(self._replace, worker))
        except OSError as error:
            raise self.identity.unusable(
                "NODE_LIBRARY_INITIALIZE_FAILED", f"its process cannot be started ({error})"
            ) from error
        except WorkerExited as end:
            await trio.to_thread.run_sync(remove_leftovers, self.identity.path)
            raise self.identity.unusable("NODE_LIBRARY_INITIALIZE_FAILED", f"its process {end.why}") from end
        if "problems" not in opened:
            return worker, opened
        await worker.ended.wait()
        raise ConfigError([Problem(**problem) for problem in opened["problems"]])

    async def _replace(self, worker: WorkerProcess) -> None:
        """Start another process if the current one has ended."""
        if worker is self._worker and not self._is_closed:
            log.error("custom node process exited", node=str(self.identity), pid=worker.pid, why=worker.why)
            try:
                await self._usable_worker()
            except CustomNodeFailure as failure:
                log.error("custom node process not restarted", reason=failure.message)  # noqa: TRY400 - the reason is logged


def _are_arrays(outputs: object) -> bool:
    return isinstance(outputs, dict) and all(isinstance(array, np.ndarray) for array in outputs.values())


def _items(rows: list[tuple[str, str | None, list[int]]]) -> Mapping[str, ItemInfo]:
    return {name: ItemInfo(name, None if kind is None else BY_NAME[kind], tuple(shape)) for name, kind, shape in rows}


async def open_isolated_node(
    path: Path,
    name: str,
    params: Mapping[str, str],
    *,
    nursery: trio.Nursery,
    grace_seconds: float = GRACE_SECONDS,
) -> IsolatedNode:
    """Load a library in a worker process and initialize a node of it; the caller closes the node.

    ``nursery`` runs the processes and outlives the node.

    Raises:
        ConfigError: like ``open_native_node``; a library that ends the process is ``NODE_LIBRARY_INITIALIZE_FAILED``.
    """
    node = IsolatedNode(NodeIdentity(name, path), dict(params), nursery, grace_seconds)
    await node.open()
    return node
