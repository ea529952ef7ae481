"""Graphs for tests: written as files, loaded as the server loads them, and called in process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import numpy as np
import trio

from ovmstrio.config.specs import GraphSpec
from ovmstrio.core.errors import ConfigError, NotFound
from ovmstrio.core.request import InferInput, InferRequest, InferResponse, ParameterValue, StreamProblem, StreamReply
from ovmstrio.core.service import InferStream, LeasedServable
from ovmstrio.core.tensor import RawTensor
from ovmstrio.graphs.graph_config import GraphConfig
from ovmstrio.graphs.graph_file import parse_graph_text
from ovmstrio.graphs.loading import load_graph
from ovmstrio.graphs.servable import GraphServable
from ovmstrio.isolation.isolated_code import Isolation
from ovmstrio.protocols.graph_text_api import GraphTextApi

GRAPH = "graph"

LOOPBACK = """
    input_stream: "LOOPBACK:loopback"
    output_stream: "LOOPBACK:loopback"
    input_stream_info: { tag_index: "LOOPBACK:0" back_edge: true }
    input_stream_handler {
      input_stream_handler: "SyncSetInputStreamHandler"
      options { [mediapipe.SyncSetInputStreamHandlerOptions.ext] { sync_set { tag_index: "LOOPBACK:0" } } }
    }
"""


def load_graph_config(content: str, file: str) -> GraphConfig:
    """Parse a graph file; raises ConfigError with all errors."""
    reading = parse_graph_text(content, file)
    errors = [problem for problem in reading.problems if problem.severity == "error"]
    if errors or reading.config is None:
        raise ConfigError(errors)
    return reading.config


def _node_text(name: str, calculator: str, side: str, streams: Sequence[Sequence[str]], more: str, options: str) -> str:
    inputs, outputs = streams
    lines = [f'name: "{name}"', f'calculator: "{calculator}"', f'input_side_packet: "{side}"']
    lines += [f'input_stream: "{text}"' for text in inputs] + [f'output_stream: "{text}"' for text in outputs]
    return "node {\n" + indent("\n".join([*lines, more, f"node_options: {{\n  {options}\n}}"]), "  ") + "\n}\n"


def python_node(
    handler: str, inputs: Sequence[str] = ("IN:in",), outputs: Sequence[str] = ("OUT:out",), *, name: str = "node",
    more: str = "",
) -> str:  # fmt: skip
    options = (
        f'[type.googleapis.com/mediapipe.PythonExecutorCalculatorOptions]: {{\n    handler_path: "{handler}"\n  }}'
    )
    side = "PYTHON_NODE_RESOURCES:py"
    return _node_text(name, "PythonExecutorCalculator", side, (inputs, outputs), dedent(more), options)


def handler(body: str, *, prefix: str = "", head: str = "") -> str:
    """Write a handler whose ``execute`` has this body; the prefix may be ``async``, and the head has imports."""
    lines = indent(dedent(body).strip("\n"), " " * 8)
    return f"{head}\nclass OvmsPythonModel:\n    {prefix}def execute(self, inputs):\n{lines}\n"


def graph_text(
    *nodes: str, inputs: Sequence[str] = ("OVMS_PY_TENSOR:in",), outputs: Sequence[str] = ("OVMS_PY_TENSOR:out",)
) -> str:
    head = [f'input_stream: "{text}"' for text in inputs] + [f'output_stream: "{text}"' for text in outputs]
    return "\n".join([*head, *nodes])


async def no_models(name: str, version: str = "", /) -> AbstractContextManager[LeasedServable]:
    raise NotFound(f"no model {name} {version}")


def _write(folder: Path, text: str, handlers: Mapping[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, source in handlers.items():
        (folder / f"{name}.py").write_text("from pyovms import Tensor\n" + dedent(source))
    path = folder / "graph.pbtxt"
    path.write_text(text)
    return path


@asynccontextmanager
async def loaded(
    folder: Path,
    text: str,
    lease: Any = no_models,
    isolation: Isolation | None = None,
    load_text: Any = None,
    **handlers: str,
) -> AsyncIterator[GraphServable]:
    """Load a graph whose handlers are given as ``name="source"``; ``load_text`` loads the models of its text nodes."""
    path = _write(folder, text, handlers)
    async with trio.open_nursery() as tasks:
        spec = GraphSpec(name=GRAPH, base_path=folder, graph_path=path)
        servable = await load_graph(
            spec, lease=lease, tasks=tasks, isolation=isolation, load_text=load_text, text_api=GraphTextApi
        )
        try:
            yield servable
        finally:
            await servable.aclose()


def ask(
    values: Mapping[str, bytes | np.ndarray[Any, Any]] | None = None,
    timestamp: ParameterValue | None = None,
    parameters: Mapping[str, ParameterValue] | None = None,
    **more: Any,
) -> InferRequest:
    """Make a request; bytes become a BYTES tensor of raw content, arrays a tensor of INT64 or FP32."""
    inputs, raws = [], []
    for name, value in (values or {}).items():
        if isinstance(value, bytes):
            inputs.append(InferInput(name, "BYTES", (len(value),)))
            raws.append(value)
        else:
            datatype = {"i": "INT64", "f": "FP32"}[value.dtype.kind]
            inputs.append(InferInput(name, datatype, value.shape))
            raws.append(value.tobytes())
    given = dict(parameters or {})
    if timestamp is not None:
        given["OVMS_MP_TIMESTAMP"] = timestamp
    return InferRequest(more.pop("model", GRAPH), inputs=inputs, raw_inputs=list(raws), parameters=given, **more)


def texts(response: InferResponse) -> dict[str, str]:
    found = {}
    for output in response.outputs:
        assert isinstance(output, RawTensor)
        found[output.name] = bytes(output.data).decode()
    return found


@dataclass
class Answers:
    """Result of a stream: outputs as (timestamp, name, text), problems, and the error that ended it."""

    outputs: list[tuple[int, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    failure: Exception | None = None
    replies: list[InferResponse] = field(default_factory=list)

    def take(self, reply: StreamReply) -> None:
        if isinstance(reply, StreamProblem):
            self.problems.append(reply.message)
            return
        self.replies.append(reply)
        ((name, text),) = texts(reply).items()
        timestamp = reply.parameters["OVMS_MP_TIMESTAMP"]
        assert isinstance(timestamp, int)
        self.outputs.append((timestamp, name, text))


def stamps(answers: Answers) -> list[int]:
    return [timestamp for timestamp, _, _ in answers.outputs]


async def stream(servable: GraphServable, *requests: InferRequest, wait_each: int = 0) -> Answers:
    """Send requests, await ``wait_each`` replies after each but the last, end the stream, and collect everything."""
    answers = Answers()
    try:
        async with servable.open_stream(requests[0]) as opened:
            for request in requests[1:]:
                for _ in range(wait_each):
                    answers.take(await opened.replies.receive())
                await _send(opened, request)
            opened.end()
            async for reply in opened.replies:
                answers.take(reply)
    except Exception as error:  # noqa: BLE001 - tests check the error of a stream
        answers.failure = error
    return answers


async def _send(opened: InferStream, request: InferRequest) -> None:
    with suppress(trio.BrokenResourceError):
        await opened.send(request)


INPUTS, OUTPUTS = ["HTTP_REQUEST_PAYLOAD:asked"], ["HTTP_RESPONSE_PAYLOAD:answer"]


def text_node(
    inputs: Sequence[str] = ("HTTP_REQUEST_PAYLOAD:changed",),
    outputs: Sequence[str] = ("HTTP_RESPONSE_PAYLOAD:made",),
    *,
    options: str = 'models_path: "./"',
    more: str = LOOPBACK,
) -> str:
    options = f"[type.googleapis.com / mediapipe.LLMCalculatorOptions]: {{ {options} }}"
    return _node_text("LLMExecutor", "HttpLLMCalculator", "LLM_NODE_RESOURCES:llm", (inputs, outputs), more, options)


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
                message = choice.get("delta") or choice.get("message") or choice
                for key in ("content", "text"):
                    message[key] = (message.get(key) or "").upper()
            return document
    """,
}
"""Handlers of these nodes: they add the words of a header and return texts in capitals."""


def session_text(*names: str) -> str:
    return "".join(
        f"""node {{
  calculator: "OpenVINOModelServerSessionCalculator"
  output_side_packet: "SESSION:{name}"
  node_options: {{
    [type.googleapis.com/mediapipe.OpenVINOModelServerSessionCalculatorOptions]: {{ servable_name: "{name}" }}
  }}
}}
"""
        for name in names
    )


def graph_calling(root: Path, *names: str, name: str = "g") -> GraphSpec:
    path = root / f"{name}.pbtxt"
    path.write_text(session_text(*names))
    return GraphSpec(name=name, base_path=root, graph_path=path)


def inference_graph(servable: str) -> str:
    """Write a graph of one node, which calls a model: its stream ``in`` is input ``b``, and ``out`` output ``a``."""
    node = f"""
        node {{
          calculator: "OpenVINOInferenceCalculator"
          input_side_packet: "SESSION:{servable}"
          input_stream: "IN:in"
          output_stream: "OUT:out"
          node_options: {{
            [type.googleapis.com / mediapipe.OpenVINOInferenceCalculatorOptions]: {{
              tag_to_input_tensor_names {{ key: "IN" value: "b" }}
              tag_to_output_tensor_names {{ key: "OUT" value: "a" }}
            }}
          }}
        }}
    """
    return graph_text(session_text(servable), dedent(node), inputs=["in"], outputs=["out"])
