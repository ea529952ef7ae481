"""The calculators of OpenVINO Model Server that make text, vectors, scores, speech or images.

::

    graph.pbtxt with one such node ── text_graphs.py ──> TextModelSpec; there is no packet graph then
    one that makes text among other nodes ── load ──> TextNode (text_node.py)

Here is only how such a node must be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.config.documents import Findings
from ovmstrio.config.specs import TextModelSpec
from ovmstrio.config.text_entries import read_text_options
from ovmstrio.core.errors import ConfigError, FailedPrecondition, ModelFailure, Problem
from ovmstrio.core.generation import Task
from ovmstrio.core.service import PayloadDocument
from ovmstrio.graphs.calculator import ContractError, DefinitionScope, NodeContract, NodeFailure
from ovmstrio.graphs.calculators.nodes import check_tags, options_of
from ovmstrio.graphs.graph_config import NodeConfig, Port
from pyovms import Tensor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from ovmstrio.config.documents import Located
    from ovmstrio.core.generation import TextGenerator
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.core.service import TextApi
    from ovmstrio.graphs.calculator import NodeContext

__all__ = [
    "EMBEDDINGS",
    "HTTP_LLM",
    "IMAGE_GEN",
    "LOOPBACK",
    "PAYLOADS",
    "RERANK",
    "SPEECH_TO_TEXT",
    "TEXT_CALCULATORS",
    "TEXT_TO_SPEECH",
    "TextModelCalculator",
    "TextNode",
    "read_node_options",
]

# ----------------------------------------------------------------------
# A model that makes text as one node among others: what a request over HTTP asks for comes in, documents go out
# ----------------------------------------------------------------------

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
    """The node in one request, as :class:`~ovmstrio.graphs.calculator.Calculator`.

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


# ----------------------------------------------------------------------
# The settings of a model of text that a node of a graph names, as the graph's file has them
# ----------------------------------------------------------------------

_PATH: Final = "models_path"
_SPELT: Final[Mapping[str, str]] = {"device": "target_device", "normalize_embeddings": "normalize"}
"""Options that a graph calls otherwise than all else does."""
_UNMENTIONED: Final = frozenset({_PATH})


def read_node_options(
    node: NodeConfig, task: Task, message: str, directory: Path, findings: Findings
) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """Give the fields of ``TextModelSpec`` that a node's options say, ``path`` among them, and what is wrong.

    ``message`` is the full name of the message of these options.  Relative paths lead on from ``directory``; problems
    have the places of options in the file of ``findings``.
    """
    options = options_of(node, message)
    fields, problems = read_text_options(task, {} if options is None else _given_options(options), directory)
    fields["path"] = directory / ("" if options is None else options.models_path)
    return fields, tuple(_placed(problem, node, message, findings) for problem in problems)


def _given_options(message: Any) -> dict[str, Any]:
    """Give what the file says, by the names of options; texts of enumerations are their names."""
    given: dict[str, Any] = {}
    for known, value in message.ListFields():
        name = _SPELT.get(known.name, known.name)
        if known.enum_type is not None:
            given[name] = known.enum_type.values_by_number[value].name
        elif known.is_repeated and known.message_type is not None:
            given[name] = [{inner.name: held for inner, held in each.ListFields()} for each in value]
        elif name not in _UNMENTIONED and (value or not isinstance(value, str)):
            given[name] = str(value) if known.message_type is not None else value
    return given


def _placed(problem: Problem, node: NodeConfig, message: str, findings: Findings) -> Problem:
    """Point at the option in the file, which may be in ``node_options`` or ``options``."""
    written = {option: name for name, option in _SPELT.items()}
    option, *_ = problem.path.split(".")
    for options in _all_options(node, message):
        name = option if option in options.members else written.get(option, option)
        if name in options.members:
            return replace(findings.place(options, replace(problem, path=name)))
    return findings.place(node.at, replace(problem, path=""))


def _all_options(node: NodeConfig, message: str) -> list[Located]:
    packed = [each for item in node.at.items("node_options") for each in item.members.values()]
    return [*packed, node.at.find("options", f"{message}.ext")]


# ----------------------------------------------------------------------
# The calculators of OpenVINO Model Server that make text, vectors, scores, speech or images
# ----------------------------------------------------------------------

_REQUESTS: Final = ("HTTP_REQUEST_PAYLOAD", "REQUEST_PAYLOAD")
_RESPONSES: Final = ("HTTP_RESPONSE_PAYLOAD", "RESPONSE_PAYLOAD")
PAYLOADS: Final = (*_REQUESTS, *_RESPONSES)
"""Tags of documents of HTTP, whole."""
_LOOPBACK: Final = "LOOPBACK"
_NO_IMAGES: Final = "models that make images are not served by this version"


@dataclass(frozen=True, slots=True)
class TextModelCalculator:
    """One of them: what it does, the message of its options without package, and the tags of its side packets."""

    name: str
    task: Task
    message: str
    resources: tuple[str, ...]

    @property
    def options(self) -> str:
        """The full name of the message of its options."""
        return f"mediapipe.{self.message}"

    def contract(self, node: NodeConfig) -> NodeContract:
        """Accept one document in and one out, and a loop where the node has one.

        Raises:
            ContractError: the node has other streams or side packets, or no options.
        """
        if self.task is Task.IMAGE_GENERATION:
            raise ContractError(_NO_IMAGES, fix="leave the graph out", code="UNIMPLEMENTED")
        check_tags(self.name, "input", node.inputs, (*_REQUESTS, _LOOPBACK))
        check_tags(self.name, "output", node.outputs, (*_RESPONSES, _LOOPBACK))
        check_tags(self.name, "input side packet", node.side_inputs, self.resources)
        for kind, refs, tags in (("input", node.inputs, _REQUESTS), ("output", node.outputs, _RESPONSES)):
            if sum(ref.port.tag in tags for ref in refs) != 1:
                raise ContractError(f"{self.name} has one {kind} stream", fix=f'add {kind}_stream: "{tags[0]}:{kind}"')
        if options_of(node, self.options) is None:
            fix = f'add node_options {{ [type.googleapis.com/{self.options}]: {{ models_path: "./" }} }}'
            raise ContractError(f"{self.name} has no options that name its models_path", fix=fix)
        return NodeContract(
            inputs={ref.port: object for ref in node.inputs},
            outputs={ref.port: object for ref in node.outputs},
            side_inputs={ref.port: object for ref in node.side_inputs},
            optional_side=frozenset(ref.port for ref in node.side_inputs),
        )

    async def load(self, node: NodeConfig, scope: DefinitionScope) -> TextNode:
        """Load the model of a node that stands among others; a graph of it alone is a model, and no graph.

        Raises:
            ConfigError: the model cannot be loaded, or does something else than to make text.
        """
        if self.task is Task.TEXT_GENERATION and scope.load_text is not None and scope.tasks is not None:
            name = f"{scope.graph}.{node.canonical_name}"
            # What is wrong with them has kept the graph from getting here.
            fields, _ = read_node_options(node, self.task, self.options, scope.directory, Findings(""))
            spec = TextModelSpec(
                name=name, base_path=scope.directory, cache_dir=scope.cache_dir, task=self.task, **fields
            )
            api = None if scope.text_api is None else scope.text_api()
            try:
                model = await scope.load_text(spec)
            except ConfigError as error:
                line, path = node.options_line or node.line, f'node "{node.canonical_name}"'
                raise ConfigError([replace(each, line=line, path=path) for each in error.problems]) from None
            return TextNode(node, scope.graph, model, api, scope.tasks)
        message = f"the graph {scope.graph!r} has become one of {self.name} since the configuration was read"
        raise ConfigError([Problem(message, line=node.line, suggestion="have the configuration read again")])


HTTP_LLM: Final = TextModelCalculator(
    "HttpLLMCalculator",
    Task.TEXT_GENERATION,
    "LLMCalculatorOptions",
    ("LLM_NODE_RESOURCES", "LLM_NODE_EXECUTION_CONTEXTS"),
)
EMBEDDINGS: Final = TextModelCalculator(
    "EmbeddingsCalculatorOV", Task.EMBEDDINGS, "EmbeddingsCalculatorOVOptions", ("EMBEDDINGS_NODE_RESOURCES",)
)
RERANK: Final = TextModelCalculator(
    "RerankCalculatorOV", Task.RERANK, "RerankCalculatorOVOptions", ("RERANK_NODE_RESOURCES",)
)
SPEECH_TO_TEXT: Final = TextModelCalculator(
    "S2tCalculator", Task.SPEECH_TO_TEXT, "S2tCalculatorOptions", ("STT_NODE_RESOURCES",)
)
TEXT_TO_SPEECH: Final = TextModelCalculator(
    "T2sCalculator", Task.TEXT_TO_SPEECH, "T2sCalculatorOptions", ("TTS_NODE_RESOURCES",)
)
IMAGE_GEN: Final = TextModelCalculator(
    "ImageGenCalculator", Task.IMAGE_GENERATION, "ImageGenCalculatorOptions", ("IMAGE_GEN_NODE_RESOURCES",)
)

TEXT_CALCULATORS: Final[Mapping[str, TextModelCalculator]] = {
    each.name: each for each in (HTTP_LLM, EMBEDDINGS, RERANK, SPEECH_TO_TEXT, TEXT_TO_SPEECH, IMAGE_GEN)
}
"""By the names that graph files use."""
