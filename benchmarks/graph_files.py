"""Graphs for benchmarks, added to a repository of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

__all__ = ["GENERATIVE", "REGULAR", "add_graphs"]

_HANDLERS: Final = Path(__file__).with_name("handlers")

_NODE: Final = """
input_stream: "OVMS_PY_TENSOR:in"
output_stream: "OVMS_PY_TENSOR:out"
node {{
  name: "node"
  calculator: "PythonExecutorCalculator"
  input_side_packet: "PYTHON_NODE_RESOURCES:py"
  input_stream: "IN:in"
  output_stream: "OUT:out"
  {loopback}
  node_options: {{
    [type.googleapis.com/mediapipe.PythonExecutorCalculatorOptions]: {{ handler_path: "{handler}" }}
  }}
}}
"""

_LOOPBACK: Final = """
  input_stream: "LOOPBACK:loopback"
  output_stream: "LOOPBACK:loopback"
  input_stream_info: { tag_index: "LOOPBACK:0", back_edge: true }
  input_stream_handler {
    input_stream_handler: "SyncSetInputStreamHandler"
    options { [mediapipe.SyncSetInputStreamHandlerOptions.ext] { sync_set { tag_index: "LOOPBACK:0" } } }
  }
"""

REGULAR: Final = ""
GENERATIVE: Final = _LOOPBACK


def add_graphs(config: Path, graphs: dict[str, tuple[str, str]]) -> Path:
    """Add graphs of one Python node each, ``{name: (handler file, REGULAR or GENERATIVE)}``, to a config.json."""
    content = json.loads(config.read_text())
    entries = []
    for name, (handler, loopback) in graphs.items():
        folder = config.parent / name
        folder.mkdir()
        (folder / "graph.pbtxt").write_text(_NODE.format(loopback=loopback, handler=_HANDLERS / handler))
        entries.append({"name": name, "base_path": str(folder)})
    content["mediapipe_config_list"] = entries
    config.write_text(json.dumps(content))
    return config
