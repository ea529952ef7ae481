"""What can be wrong with a native custom node, in the words that users of such libraries look for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ovmstrio.core.errors import ConfigError, CustomNodeFailure, Problem

__all__ = ["TEXTS", "NodeIdentity"]

TEXTS: Final[Mapping[str, str]] = {
    "NODE_LIBRARY_LOAD_FAILED_OPEN": "Custom node library cannot be opened",
    "NODE_LIBRARY_LOAD_FAILED_SYM": "Custom node library lacks a function of the interface",
    "NODE_LIBRARY_INITIALIZE_FAILED": "Custom node failed to initialize",
    "NODE_LIBRARY_METADATA_FAILED": "Custom node failed to describe its inputs and outputs",
    "NODE_LIBRARY_EXECUTION_FAILED": "Custom node failed during execution",
    "NODE_LIBRARY_OUTPUTS_CORRUPTED": "Custom node library has returned a corrupted handle",
    "NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT": "Custom node library has returned a corrupted count",
    "NODE_LIBRARY_OUTPUT_MISSING_NAME": "Custom node gave an output without a name",
    "NODE_LIBRARY_INVALID_PRECISION": "Custom node gave an output of an unknown precision",
    "NODE_LIBRARY_INVALID_SHAPE": "Custom node gave an output of an impossible shape",
    "NODE_LIBRARY_INVALID_CONTENT_SIZE": "Custom node gave an output of another size than its shape needs",
}
"""What each code means; the code itself ends the message."""


class NodeIdentity:
    """The name of a node and the library it comes from, for messages."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    def __str__(self) -> str:
        return f"node {self.name!r} of {self.path}"

    def failed(self, code: str, detail: str) -> CustomNodeFailure:
        """Make the error of a call."""
        return CustomNodeFailure(f"{TEXTS[code]}; {self}: {detail} ({code})")

    def unusable(self, code: str, detail: str, suggestion: str = "") -> ConfigError:
        """Make the error of opening the node."""
        return ConfigError([self.problem(code, detail, suggestion=suggestion)])

    def problem(self, code: str, detail: str, *, line: int | None = None, suggestion: str = "") -> Problem:
        """Note something wrong with the library."""
        message = f"{TEXTS[code]}; node {self.name!r}: {detail} ({code})"
        return Problem(message, str(self.path), line, suggestion=suggestion)
