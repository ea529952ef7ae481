"""One attempt of one request: samples go from Op to Op as soon as all their inputs are there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.events import note_failure
from ovmstrio.runtimes.ops.executor import op_failures as failures
from ovmstrio.runtimes.ops.executor.channel import Result, Sample, StallDetector, Ticket
from ovmstrio.runtimes.ops.executor.copying import Copier
from ovmstrio.runtimes.ops.executor.op_failures import OpFailure
from ovmstrio.runtimes.ops.executor.runner import OpRunner
from ovmstrio.runtimes.ops.graph import OpGraph
from ovmstrio.runtimes.ops.op import EXECUTOR_NAME
from ovmstrio.runtimes.ops.values import CustomExceptionCode

__all__ = ["MOST_JUMPS", "RequestRun"]

MOST_JUMPS: Final = 1000
"""How often one request may jump, so that a loop of Ops always ends."""

log = structlog.get_logger(__name__)


class RequestRun:
    """One attempt.  All that it holds goes with it: parts of joins, places in channels, tasks.

    Args:
        graph: the Ops.
        runners: what runs them, by their names.
        data_id: the server's number of the request.
        log_id: the client's.
        takes_first: whether an Op with several inputs runs with the one that comes first, and never again.
        stall_detector: is told of what moves.
        copier: copies outputs that several Ops get.
    """

    def __init__(
        self,
        graph: OpGraph,
        runners: Mapping[str, OpRunner],
        data_id: int,
        log_id: int,
        *,
        takes_first: bool,
        stall_detector: StallDetector,
        copier: Copier,
    ) -> None:
        self._graph = graph
        self._runners = runners
        self._data_id = data_id
        self._log_id = log_id
        self._takes_first = takes_first
        self._stall_detector = stall_detector
        self._copier = copier
        self._parts: dict[str, dict[str, Any]] = {}
        self._served: set[str] = set()
        self._tickets: set[Ticket] = set()
        self._jumps = 0
        self._output: dict[str, Any] | None = None
        self._failure: OpFailure | None = None
        self._nursery: trio.Nursery | None = None

    async def run(self, first: dict[str, Any]) -> dict[str, Any]:
        """Give the last Op's output for the RequestOp's.

        Raises:
            OpFailure: the request ends with it.

        Ownership: tasks and places in channels, which are gone when it ends.

        Cancellation: at once; what workers still do is waited for elsewhere.
        """
        try:
            if self._graph.is_chain:
                ready = await self._hand_on(EXECUTOR_NAME, first)
                while ready:
                    ready = await self._work(*ready[0])
            else:
                await self._run_beside(first)
        finally:
            for ticket in list(self._tickets):
                ticket.leave()
        if self._failure is not None:
            raise self._failure
        if self._output is None:
            text = "no Op is left that runs, and the last one has not run"
            raise OpFailure(CustomExceptionCode.UNKNOW.value, text)
        return self._output

    async def _run_beside(self, first: dict[str, Any]) -> None:
        try:
            async with trio.open_nursery() as self._nursery:
                try:
                    await self._follow(await self._begin(first))
                finally:
                    self._stall_detector.stop()
        finally:
            self._stall_detector.go()

    async def _begin(self, first: dict[str, Any]) -> list[tuple[str, Ticket]]:
        try:
            return await self._hand_on(EXECUTOR_NAME, first)
        except OpFailure as failure:
            self._fail(failure)
            return []

    async def _follow(self, ready: list[tuple[str, Ticket]]) -> None:
        """Run Ops that are ready: one here, and then those that it makes ready; the others beside it."""
        while ready:
            for name, ticket in ready[1:]:
                self._start_beside(name, ticket)
            ready = await self._work(*ready[0])

    def _start_beside(self, name: str, ticket: Ticket) -> None:
        if self._nursery is None:
            raise AssertionError("Ops were run before their request")
        self._stall_detector.go()
        self._nursery.start_soon(self._beside, name, ticket)

    async def _beside(self, name: str, ticket: Ticket) -> None:
        try:
            await self._follow([(name, ticket)])
        finally:
            self._stall_detector.stop()

    async def _work(self, name: str, ticket: Ticket) -> list[tuple[str, Ticket]]:
        """Run an Op, and hold its seat until its output is in the next channels; gives who is ready then."""
        runner = self._runners[name]
        try:
            if not ticket.is_seated:
                await ticket.seated()
            (result,) = await runner.run(Sample(self._data_id, self._log_id, self._parts.pop(name)))
            if result.failure is not None:
                return self._op_failed(name, result.failure)
            begin = time.perf_counter()
            ready = await self._deliver(name, result)
            runner.report_stage("out", [self._data_id], (begin, time.perf_counter()))
        except OpFailure as failure:
            return self._op_failed(name, failure)
        except Exception as error:  # the border of the Op: an error of another kind must not get among cancellations
            log.exception("Op failed", op=name, data_id=self._data_id)
            note_failure(node=name)
            self._fail(failures.unforeseen(name, error))
            return []
        else:
            return ready
        finally:
            runner.channel.leave(ticket)
            self._tickets.discard(ticket)

    def _op_failed(self, name: str, failure: OpFailure) -> list[tuple[str, Ticket]]:
        if not self._is_superfluous(name):
            note_failure(node=name)
            self._fail(failure)
        return []

    async def _deliver(self, name: str, result: Result) -> list[tuple[str, Ticket]]:
        if result.output is None:
            raise AssertionError("a result is neither an output nor a failure")
        if result.jumps:
            return await self._jump(name, result.output)
        if name == self._graph.last:
            self._end(result.output)
            return []
        return await self._hand_on(name, result.output)

    def _is_superfluous(self, name: str) -> bool:
        """Tell whether nobody needs an Op's output any more, because all that it leads to has run without it."""
        if name == self._graph.last:
            return False
        return all(one in self._served or self._is_superfluous(one) for one in self._graph.consumers[name])

    def _end(self, output: dict[str, Any]) -> None:
        self._output = output
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def _fail(self, failure: OpFailure) -> None:
        self._failure = self._failure or failure
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    async def _hand_on(
        self, producer: str, output: dict[str, Any], *, is_forced: bool = False
    ) -> list[tuple[str, Ticket]]:
        """Give an output to its consumers, and get those that have all their inputs now into their channels."""
        consumers: Sequence[str] = self._graph.consumers[producer]
        if self._served:
            consumers = [name for name in consumers if name not in self._served]
        outputs = [output] if len(consumers) == 1 else await self._copier.copies(output, len(consumers))
        ready = []
        # What is complete is known before the first channel is waited for.
        for name in tuple(map(self._added, consumers, repeat(producer), outputs)):
            if not name:
                continue
            channel = self._runners[name].channel
            ticket = channel.enter_now(self._data_id)
            if ticket is None:
                ticket = await channel.enter(self._data_id, is_forced=is_forced)
            self._tickets.add(ticket)
            ready.append((name, ticket))
        return ready

    def _added(self, name: str, producer: str, output: dict[str, Any]) -> str:
        """Note one input of an Op; gives its name if it has all that it needs."""
        inputs = self._graph.inputs[name]
        if len(inputs) == 1 or self._takes_first:
            if len(inputs) > 1:
                if name in self._served:  # by another input, while this one was copied
                    return ""
                self._served.add(name)
            self._parts[name] = {producer: output}
            return name
        parts = self._parts.setdefault(name, {})
        parts[producer] = output
        if len(parts) < len(inputs):
            return ""
        self._parts[name] = {one: parts[one] for one in inputs}
        return name

    async def _jump(self, name: str, output: dict[str, Any]) -> list[tuple[str, Ticket]]:
        self._jumps += 1
        if self._jumps > MOST_JUMPS:
            text = f"Op {name} has jumped {MOST_JUMPS} times for one request, as often as it may"
            raise OpFailure(CustomExceptionCode.UNKNOW.value, text)
        targets = self._graph.jumps[name]
        if self._graph.last in targets:
            self._end(output)
            return []
        ready = []
        for target, one in zip(targets, await self._copier.copies(output, len(targets)), strict=True):
            # A channel of a loop that is full must not wait for itself.
            ready += await self._hand_on(target, one, is_forced=True)
        return ready
