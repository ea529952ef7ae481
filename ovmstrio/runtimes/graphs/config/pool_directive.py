"""The pool directive: a comment of the graph file that asks for instances that are kept.

::

    # OVMS_GRAPH_QUEUE_MAX_SIZE: 4
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from ovmstrio.config.findings import Findings
from ovmstrio.config.located import Located
from ovmstrio.runtimes.graphs.config.graph_messages import FILE_INVALID

__all__ = ["PoolDirective", "read_pool"]

_DIRECTIVE: Final = re.compile(r"^[ \t]*#[ \t]*OVMS_GRAPH_QUEUE_MAX_SIZE[ \t]*:(?P<value>.*)$", re.MULTILINE)
_SIZE: Final = re.compile(r"[0-9]{1,9}")
_OFF_SWITCH: Final = "OVMS_GRAPH_QUEUE_OFF"


@dataclass(frozen=True, slots=True)
class PoolDirective:
    """How many instances are asked for, 0 for none, and where."""

    size: int = 0
    line: int = 0


def read_pool(text: str, findings: Findings) -> PoolDirective:
    """Find the directive; the number is bounded by that of processors."""
    match = _DIRECTIVE.search(text)
    if match is None:
        return PoolDirective()
    line = text.count("\n", 0, match.start()) + 1
    value = match["value"].strip()
    if value != "AUTO" and not _SIZE.fullmatch(value):
        findings.refuse(
            Located(None, line),
            f"{FILE_INVALID} - OVMS_GRAPH_QUEUE_MAX_SIZE cannot be used",
            expected="AUTO or a number from 0",
            found=value,
            suggestion="write AUTO, a number, or remove the line",
        )
        return PoolDirective(line=line)
    processors = os.cpu_count() or 1
    asked = processors if value == "AUTO" else int(value)
    if asked > processors:
        message = f"OVMS_GRAPH_QUEUE_MAX_SIZE is more than there are processors; {processors} are used"
        findings.warn(Located(None, line), message)
    is_off = os.environ.get(_OFF_SWITCH) == "1"
    return PoolDirective(0 if is_off else min(asked, processors), line)
