"""Graphs in which a model that makes text stands among Python nodes."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import indent
from typing import Any

from tests.support.graphs import LOOPBACK, graph_text, python_node

__all__ = ["BEFORE_AND_BEHIND", "INPUTS", "OUTPUTS", "SHOUTING", "llm_graph", "text_node"]

INPUTS, OUTPUTS = ["HTTP_REQUEST_PAYLOAD:asked"], ["HTTP_RESPONSE_PAYLOAD:answer"]


def text_node(
    inputs: Sequence[str] = ("HTTP_REQUEST_PAYLOAD:changed",),
    outputs: Sequence[str] = ("HTTP_RESPONSE_PAYLOAD:made",),
    *,
    options: str = 'models_path: "./"',
    more: str = LOOPBACK,
) -> str:
    """Write a node that makes text, as graphs of OpenVINO Model Server have it."""
    streams = [f'input_stream: "{text}"' for text in inputs] + [f'output_stream: "{text}"' for text in outputs]
    body = "\n".join([
        'name: "LLMExecutor"',
        'calculator: "HttpLLMCalculator"',
        'input_side_packet: "LLM_NODE_RESOURCES:llm"',
        *streams,
        more,
        f"node_options: {{ [type.googleapis.com / mediapipe.LLMCalculatorOptions]: {{ {options} }} }}",
    ])  # fmt: skip
    return "node {\n" + indent(body, "  ") + "\n}\n"


def llm_graph(*options: str) -> str:
    """Write the graph that OpenVINO Model Server writes for a language model, with a line for each option."""
    inputs, outputs = ["HTTP_REQUEST_PAYLOAD:input"], ["HTTP_RESPONSE_PAYLOAD:output"]
    node = text_node(inputs, outputs, options="\n".join(['models_path: "./",', *options, ""]))
    return graph_text(node, inputs=inputs, outputs=outputs)


BEFORE_AND_BEHIND = graph_text(
    python_node("before.py", INPUTS, ["HTTP_REQUEST_PAYLOAD:changed"], name="before"),
    text_node(),
    python_node("behind.py", ["HTTP_RESPONSE_PAYLOAD:made"], OUTPUTS, name="behind"),
    inputs=INPUTS,
    outputs=OUTPUTS,
)
"""A request goes through Python to a model, and its answer through Python to the client."""

SHOUTING: dict[str, Any] = {
    "before": """
    class OvmsPythonModel:
        def execute(self, inputs):
            body = dict(inputs[0].json)
            words = inputs[0].headers.get("x-words", "")
            if "messages" in body:
                body["messages"] = [{"role": "user", "content": body["messages"][-1]["content"] + words}]
            return body
    """,
    "behind": """
    import json
    class OvmsPythonModel:
        def execute(self, inputs):
            document = json.loads(bytes(inputs[0]))
            for choice in document.get("choices", ()):
                said = choice.get("delta") or choice.get("message") or choice
                for key in ("content", "text"):
                    said[key] = (said.get(key) or "").upper()
            return document
    """,
}
"""Handlers of these nodes: the words of a header are said, too, and all that comes back is in capitals."""
