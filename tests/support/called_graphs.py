"""Graphs whose sessions call what else is served; they do nothing else."""

from __future__ import annotations

from pathlib import Path

from ovmstrio.config.specs import GraphSpec


def session_text(*names: str) -> str:
    """Write the sessions of a graph, each of which takes seven lines."""
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
    """Write a graph with a session for each name, and configure it."""
    path = root / f"{name}.pbtxt"
    path.write_text(session_text(*names))
    return GraphSpec(name=name, base_path=root, graph_path=path)
