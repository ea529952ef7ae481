"""OVMS's calculators for text generation, embeddings, reranking, speech and images.

A graph with one such node becomes a ``TextModelSpec`` (``ovmstrio.graphs.kind``). A text-generation node among other
nodes becomes a :class:`_TextNodeResources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.config.documents import Findings
from ovmstrio.config.specs import TextModelSpec
from ovmstrio.config.text_entries import parse_text_options
from ovmstrio.core.errors import ConfigError, FailedPrecondition, ModelFailure, Problem
from ovmstrio.core.generation import Task
from ovmstrio.core.payloads import RawDocument
from ovmstrio.graphs.calculator import ContractError, DefinitionScope, NodeContract, NodeFailure
from ovmstrio.graphs.calculators.nodes import check_tags, find_options
from ovmstrio.graphs.graph_config import NodeConfig, Port
from ovmstrio.graphs.python_nodes.api import Tensor
from ovmstrio.stores.address import find_address, local_path

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from ovmstrio.core.generation import TextGenerator
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.core.payloads import TextApiAdapter
    from ovmstrio.graphs.calculator import NodeContext

# Text-generation nodes

LOOPBACK: Final = Port("LOOPBACK", 0)
_BUSY: Final = "the node is already generating; it accepts one document per request"


class _TextNodeResources:
    """Shared state of a text-generation node.

    Args:
        node: the node's configuration.
        graph: the graph's name, used as the model name in responses.
        model: the text generator; owned by the node.
        api: request parser and response writer; None if the graph is only validated.
        tasks: runs the generation tasks; outlives the graph.
    """

    def __init__(
        self, node: NodeConfig, graph: str, model: TextGenerator, api: TextApiAdapter | None, tasks: trio.Nursery
    ) -> None:
        self._output = next(ref for ref in node.outputs if ref.port != LOOPBACK)
        self._graph = graph
        self._model = model
        self._api = api
        self._tasks = tasks

    @property
    def unready_reason(self) -> str:
        reason: str = getattr(self._model, "unready_reason", "")
        return reason

    async def open(self, context: NodeContext) -> _TextNodeCalculator:
        request = context.instance.http
        if request is None or self._api is None:
            raise FailedPrecondition(f'node "{context.node.canonical_name}" accepts only raw HTTP requests')
        return _TextNodeCalculator(self, request, self._output.port, self._output.name)

    async def aclose(self) -> None:
        await self._model.aclose()

    async def start(self, request: HttpRequest) -> _TextResponse:
        api = self._api
        assert api is not None  # noqa: S101 - checked by `open`
        answer = _TextResponse()

        async def generate(send: Callable[[RawDocument], Awaitable[None]]) -> None:
            await api.answer(self._model, self._graph, request, send)

        await self._tasks.start(answer.run, generate)
        return answer


class _TextNodeCalculator:
    """Calculator of a text-generation node for one request.

    Args:
        shared: generates the response.
        request: the HTTP request; input documents replace its body.
        port: the output port.
        name: the output stream.
    """

    def __init__(self, shared: _TextNodeResources, request: HttpRequest, port: Port, name: str) -> None:
        self._shared = shared
        self._request = request
        self._port = port
        self._name = name
        self._answer: _TextResponse | None = None
        self._timestamp = 0

    async def process(self, context: NodeContext) -> None:
        """Start generating from a document, or send the next piece of the response.

        Raises:
            ServerError: the document is invalid, or the server is overloaded.
            NodeFailure: the model failed, or a document arrived during generation.
        """
        value = next((value for port, value in context.inputs.items() if port != LOOPBACK), None)
        if value is not None:
            if self._answer is not None:
                raise NodeFailure(_BUSY, "RESOURCE_EXHAUSTED")
            if not isinstance(value, Tensor):
                raise NodeFailure(f"expected an HTTP request or a document, got {type(value).__name__}")
            self._timestamp = context.timestamp
            self._answer = await self._shared.start(self._request._replace(body=bytes(value), view=None))
        if self._answer is not None:
            await self._send(context, self._answer)

    async def _send(self, context: NodeContext, answer: _TextResponse) -> None:
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
        del context
        answer, self._answer = self._answer, None
        if answer is not None:
            await answer.aclose()


class _TextResponse:
    """Documents of one response, generated by a separate task that waits for the reader."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[RawDocument](0)
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._failure: Exception | None = NodeFailure("the server stopped")

    async def run(
        self,
        generate: Callable[[Callable[[RawDocument], Awaitable[None]]], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        try:
            with self._scope, self._send:
                task_status.started()
                await generate(self._send.send)
                self._failure = None
        except Exception as error:  # noqa: BLE001 - raised by `receive`
            self._failure = error
        finally:
            self._ended.set()

    async def receive(self) -> RawDocument | None:
        """Return the next document; None after the last one. Raises the error that ended the generation."""
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            if self._failure is not None:
                raise self._failure from None
            return None

    async def aclose(self) -> None:
        """Cancel the generation and wait until it has stopped, also if the caller is cancelled."""
        self._scope.cancel()
        self._receive.close()
        await self._ended.wait()


# Options

_PATH: Final = "models_path"
_RENAMED_OPTIONS: Final[Mapping[str, str]] = {"device": "target_device", "normalize_embeddings": "normalize"}
"""Option names of graph files that differ from those of ``TextModelSpec``."""
_IGNORED_OPTIONS: Final = frozenset({_PATH})


def read_node_options(
    node: NodeConfig, task: Task, message: str, directory: Path, findings: Findings
) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """Return the ``TextModelSpec`` fields of a node's options, including ``path``, and the problems found.

    ``message`` is the full name of the options message. Relative paths start at ``directory``. Problems have positions
    in the file of ``findings``.
    """
    options = find_options(node, message)
    fields, problems = parse_text_options(task, {} if options is None else _given_options(options), directory)
    named = ["" if options is None else options.models_path, getattr(options, "draft_models_path", None) or ""]
    fields["path"] = directory / local_path(named[0])
    if sources := tuple(address for path in named if (address := find_address(path)) is not None):
        fields["sources"] = sources
    if task is Task.EMBEDDINGS:
        # A graph without the options has the vectors that it has in OVMS, whatever the model's files say.
        fields = {"pooling": "CLS", "normalize": True, "default_prompt_name": "", **fields}
    return fields, tuple(_placed(problem, node, message, findings) for problem in problems)


def _given_options(message: Any) -> dict[str, Any]:
    """Return the options by name; enum values are their names."""
    given: dict[str, Any] = {}
    for known, value in message.ListFields():
        name = _RENAMED_OPTIONS.get(known.name, known.name)
        if known.enum_type is not None:
            given[name] = known.enum_type.values_by_number[value].name
        elif known.is_repeated and known.message_type is not None:
            given[name] = [{inner.name: held for inner, held in each.ListFields()} for each in value]
        elif name not in _IGNORED_OPTIONS and (value or not isinstance(value, str)):
            given[name] = str(value) if known.message_type is not None else value
    return given


def _placed(problem: Problem, node: NodeConfig, message: str, findings: Findings) -> Problem:
    """Add the option's position, which may be in ``node_options`` or ``options``."""
    written = {option: name for name, option in _RENAMED_OPTIONS.items()}
    option, *_ = problem.path.split(".")
    packed = [each for item in node.at.items("node_options") for each in item.members.values()]
    for options in (*packed, node.at.find("options", f"{message}.ext")):
        name = option if option in options.members else written.get(option, option)
        if name in options.members:
            return replace(findings.place(options, replace(problem, path=name)))
    return findings.place(node.at, replace(problem, path=""))


# OVMS calculators

_REQUESTS: Final = ("HTTP_REQUEST_PAYLOAD", "REQUEST_PAYLOAD")
_RESPONSES: Final = ("HTTP_RESPONSE_PAYLOAD", "RESPONSE_PAYLOAD")
PAYLOAD_TAGS: Final = (*_REQUESTS, *_RESPONSES)
"""Tags of HTTP payload streams."""
_LOOPBACK: Final = "LOOPBACK"


@dataclass(frozen=True, slots=True)
class TextModelCalculator:
    """An OVMS calculator: its task, options message (without package) and resource side packets."""

    name: str
    task: Task
    message: str
    resources: tuple[str, ...]

    @property
    def options(self) -> str:
        """Full name of the options message."""
        return f"mediapipe.{self.message}"

    def contract(self, node: NodeConfig) -> NodeContract:
        """Return the contract: one HTTP payload in, one out, and an optional loopback."""
        check_tags(self.name, "input", node.inputs, (*_REQUESTS, _LOOPBACK))
        check_tags(self.name, "output", node.outputs, (*_RESPONSES, _LOOPBACK))
        check_tags(self.name, "input side packet", node.side_inputs, self.resources)
        for kind, refs, tags in (("input", node.inputs, _REQUESTS), ("output", node.outputs, _RESPONSES)):
            if sum(ref.port.tag in tags for ref in refs) != 1:
                raise ContractError(
                    f"{self.name} needs exactly one {kind} stream", fix=f'add {kind}_stream: "{tags[0]}:{kind}"'
                )
        if find_options(node, self.options) is None:
            fix = f'add node_options {{ [type.googleapis.com/{self.options}]: {{ models_path: "./" }} }}'
            raise ContractError(f"{self.name} has no options with a models_path", fix=fix)
        return NodeContract(
            inputs={ref.port: object for ref in node.inputs},
            outputs={ref.port: object for ref in node.outputs},
            side_inputs={ref.port: object for ref in node.side_inputs},
            optional_side=frozenset(ref.port for ref in node.side_inputs),
        )

    async def load(self, node: NodeConfig, scope: DefinitionScope) -> _TextNodeResources:
        """Load the model of a text-generation node among other nodes; a graph of this node alone is a text model."""
        if self.task is Task.TEXT_GENERATION and scope.load_text is not None and scope.tasks is not None:
            name = f"{scope.graph}.{node.canonical_name}"
            # Problems of the options prevented loading before this point.
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
            return _TextNodeResources(node, scope.graph, model, api, scope.tasks)
        message = f"graph {scope.graph!r} has changed to a {self.name} graph since the configuration was read"
        raise ConfigError([Problem(message, line=node.line, suggestion="reload the configuration")])


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
"""Calculators by their names in graph files."""
