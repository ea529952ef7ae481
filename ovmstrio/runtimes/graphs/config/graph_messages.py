"""What problems of graph files begin with: the text that OpenVINO Model Server has for the like."""

from __future__ import annotations

from typing import Final

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
