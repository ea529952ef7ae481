"""The calculators of OpenVINO Model Server that make text, vectors, scores, speech or images.

::

    graph.pbtxt with one such node ── text_graphs.py ──> TextModelSpec; there is no packet graph then
    one that makes text among other nodes ── load ──> TextNode (text_node.py)

Here is only how such a node must be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from ovmstrio.config.findings import Findings
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.runtimes.graphs.calculator import ContractError, DefinitionScope, NodeContract
from ovmstrio.runtimes.graphs.calculators.nodes import check_tags, options_of
from ovmstrio.runtimes.graphs.calculators.text_node import TextNode
from ovmstrio.runtimes.graphs.calculators.text_node_options import read_node_options
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig

__all__ = [
    "EMBEDDINGS",
    "HTTP_LLM",
    "IMAGE_GEN",
    "PAYLOADS",
    "RERANK",
    "SPEECH_TO_TEXT",
    "TEXT_CALCULATORS",
    "TEXT_TO_SPEECH",
    "TextModelCalculator",
]

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
