"""A model that makes text as one node among others: what a request over HTTP asks for comes in, documents go out.

::

    document ─> TextApi.answer in a task of the graph's ─> one document a run, and LOOPBACK for the next one
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.errors import FailedPrecondition, ModelFailure
from ovmstrio.core.payloads import PayloadDocument
from ovmstrio.runtimes.graphs.calculator import NodeFailure
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
from pyovms import Tensor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ovmstrio.core.generation import TextGenerator
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.core.payloads import TextApi
    from ovmstrio.runtimes.graphs.calculator import NodeContext

__all__ = ["LOOPBACK", "TextNode"]

LOOPBACK: Final = Port("LOOPBACK", 0)
_BUSY: Final = "the node makes a text already; it takes one document for each request"


class TextNode:
    """What the instances of such a node share.

    Args:
        node: as the file has it.
        graph: whose node it is, which is the model that answers name.
        model: makes the texts; owned from now on.
        api: reads and writes documents; None where nobody can ask, as in a check.
        tasks: own what runs while texts are made; outlive the graph.
    """

    def __init__(
        self, node: NodeConfig, graph: str, model: TextGenerator, api: TextApi | None, tasks: trio.Nursery
    ) -> None:
        self._output = next(ref for ref in node.outputs if ref.port != LOOPBACK)
        self._graph = graph
        self._model = model
        self._api = api
        self._tasks = tasks

    @property
    def obstacle(self) -> str:
        """Why its model cannot answer now; empty if it can."""
        told: str = getattr(self._model, "obstacle", "")
        return told

    async def open(self, context: NodeContext) -> TextNodeRun:
        """Make the calculator of one request.  Never waits.

        Raises:
            FailedPrecondition: there is no request over HTTP, or nobody who could read it.
        """
        asked = context.instance.http
        if asked is None or self._api is None:
            raise FailedPrecondition(f'node "{context.node.canonical_name}" answers requests over HTTP alone')
        return TextNodeRun(self, asked, self._output.port, self._output.name)

    async def aclose(self) -> None:
        """Give the model back.

        Cancellation: as the model's own.
        """
        await self._model.aclose()

    async def start(self, asked: HttpRequest) -> _Answer:
        """Have a request answered; the caller closes the answer.

        Cancellation: nothing has begun then.
        """
        api = self._api
        assert api is not None  # noqa: S101 - `open` has seen to it
        answer = _Answer()

        async def make(send: Callable[[PayloadDocument], Awaitable[None]]) -> None:
            await api.answer(self._model, self._graph, asked, send)

        await self._tasks.start(answer.run, make)
        return answer


class TextNodeRun:
    """The node in one request, as :class:`~ovmstrio.runtimes.graphs.calculator.Calculator`.

    Args:
        shared: makes the answer.
        asked: the request as it came, whose body documents take the place of.
        port: by which documents leave.
        name: of the stream that they leave by.
    """

    def __init__(self, shared: TextNode, asked: HttpRequest, port: Port, name: str) -> None:
        self._shared = shared
        self._asked = asked
        self._port = port
        self._name = name
        self._answer: _Answer | None = None
        self._timestamp = 0

    async def process(self, context: NodeContext) -> None:
        """Begin to answer a document, or send what has come of the answer since.

        Raises:
            ServerError: the document is refused, or there is no room.
            NodeFailure: the model failed, or something came while it makes a text.

        Cancellation: while there is nothing to send.
        """
        value = next((value for port, value in context.inputs.items() if port != LOOPBACK), None)
        if value is not None:
            if self._answer is not None:
                raise NodeFailure(_BUSY, "RESOURCE_EXHAUSTED")
            if not isinstance(value, Tensor):
                raise NodeFailure(f"expected a request over HTTP or a document, got {type(value).__name__}")
            self._timestamp = context.timestamp
            self._answer = await self._shared.start(self._asked._replace(body=bytes(value), view=None))
        if self._answer is not None:
            await self._send(context, self._answer)

    async def _send(self, context: NodeContext, answer: _Answer) -> None:
        try:
            document = await answer.receive()
        except ModelFailure as error:
            raise NodeFailure(error.message) from None
        if document is None:
            self._answer = None
            return
        made = Tensor(self._name, document.data, datatype=document.media_type)
        context.emit(self._port, made, self._timestamp)
        self._timestamp += 1
        context.emit(LOOPBACK, value=True, timestamp=self._timestamp)

    async def close(self, context: NodeContext) -> None:
        """Stop making the text, if it is not at its end.

        Cancellation: shielded; the model lets go within a step.
        """
        del context
        answer, self._answer = self._answer, None
        if answer is not None:
            await answer.aclose()


class _Answer:
    """Documents of one request, which are made in a task of their own, not before somebody takes them."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[PayloadDocument](0)
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._failure: Exception | None = NodeFailure("the server has ended")

    async def run(
        self,
        make: Callable[[Callable[[PayloadDocument], Awaitable[None]]], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Make them, and keep what goes wrong for who receives them.

        Cancellation: by :meth:`aclose`.
        """
        try:
            with self._scope, self._send:
                task_status.started()
                await make(self._send.send)
                self._failure = None
        except Exception as error:  # noqa: BLE001 - told where documents are received
            self._failure = error
        finally:
            self._ended.set()

    async def receive(self) -> PayloadDocument | None:
        """Give the next one; None behind the last one.

        Raises:
            Exception: what went wrong.

        Cancellation: while there is none.
        """
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            if self._failure is not None:
                raise self._failure from None
            return None

    async def aclose(self) -> None:
        """Make no more, and return when what made them has ended.

        Cancellation: what makes them ends all the same.
        """
        self._scope.cancel()
        self._receive.close()
        await self._ended.wait()
