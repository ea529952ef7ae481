"""Problems of graph files.  Each begins with the text that OpenVINO Model Server has for the like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ovmstrio.core.errors import Problem

__all__ = [
    "FILE_INVALID",
    "HANDLER_MISSING",
    "INITIALIZATION",
    "INPUT_NAME",
    "INTERNAL",
    "NODE_NAME_MISSING",
    "NODE_NAME_TAKEN",
    "NODE_OPTIONS_MISSING",
    "NOT_IMPLEMENTED",
    "OUTPUT_NAME",
    "REQUEST_INPUTS",
    "REQUEST_MISSING",
    "REQUEST_OUTPUTS",
    "RESPONSE_MISSING",
    "SIDE_NAME",
    "GraphFindings",
]

FILE_INVALID: Final = "Failed to read protobuf graph configuration file"
INITIALIZATION: Final = "Failed to initialize mediapipe graph"
INPUT_NAME: Final = "Mediapipe unexpected input stream packets name"
OUTPUT_NAME: Final = "Mediapipe unexpected output stream packets name"
SIDE_NAME: Final = "Mediapipe unexpected input side packet stream name"
REQUEST_INPUTS: Final = "Mediapipe unexpected input stream packets count"
REQUEST_OUTPUTS: Final = "Mediapipe unexpected output stream packets count"
RESPONSE_MISSING: Final = "Mediapipe passthrough graph misses RESPONSE in output"
REQUEST_MISSING: Final = "Mediapipe passthrough graph misses REQUEST in input"
NODE_OPTIONS_MISSING: Final = "The Python Node is missing options definition"
NODE_NAME_MISSING: Final = "The Python Node is missing name definition"
NODE_NAME_TAKEN: Final = "The Python Node name is already present in nodes list"
HANDLER_MISSING: Final = "The Python Node file path does not exist"
INTERNAL: Final = "Internal server error"
NOT_IMPLEMENTED: Final = "Functionality not implemented"


@dataclass(slots=True)
class GraphFindings:
    """The problems of one graph file."""

    file: str
    problems: list[Problem] = field(default_factory=list)

    def add(
        self, base: str, details: str, line: int, path: str = "", *, expected: str = "", found: str = "", fix: str = ""
    ) -> None:
        """Note an error; ``base`` is one of the texts above."""
        self.problems.append(Problem(f"{base} - {details}", self.file, line, path, expected, found, fix))

    def warn(self, message: str, line: int, path: str = "", *, fix: str = "") -> None:
        """Note something that loads and will hardly do what was meant."""
        self.problems.append(Problem(message, self.file, line, path, "", "", fix, "warning"))
