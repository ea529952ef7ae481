"""Which streams of a graph carry a chat: those that a comment names, or those that a generative graph has anyway.

::

    # OVMSTRIO_CHAT: prompt=prompt text=completion end=end_signal

OpenVINO Model Server takes no notice of the comment.  A graph without it answers chats if a node of it has a generator,
its only input is a Python tensor, and so is its output, or its two, of which the second is the end.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ovmstrio.config.findings import did_you_mean, suggest_key
from ovmstrio.config.located import Located
from ovmstrio.runtimes.graphs.config.graph_config import ChatRoles
from ovmstrio.runtimes.graphs.config.graph_messages import FILE_INVALID
from ovmstrio.runtimes.graphs.packets import PYTHON_TENSOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.config.findings import Findings
    from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, StreamRef

__all__ = ["read_chat_roles"]

_NAME: Final = "OVMSTRIO_CHAT"
_COMMENT: Final = re.compile(r"^[ \t]*#[ \t]*(?P<name>OVMSTRIO_\w+)[ \t]*:(?P<value>.*)$", re.MULTILINE)
_OF_INPUTS: Final = ("prompt", "messages")
_OF_OUTPUTS: Final = ("text", "end", "usage")
_EXAMPLE: Final = f"# {_NAME}: prompt=NAME text=NAME"


def read_chat_roles(
    content: str,
    inputs: Sequence[StreamRef],
    outputs: Sequence[StreamRef],
    nodes: Sequence[NodeConfig],
    findings: Findings,
) -> ChatRoles | None:
    """Find the streams of a chat; None if the graph answers none.

    Args:
        content: the graph file's text.
        inputs: those of the graph itself, as its outputs are.
        outputs: see ``inputs``.
        nodes: all of them.
        findings: is told what is wrong with the comment.
    """
    comment = _find(content, findings)
    if comment is None:
        return _unasked(inputs, outputs, nodes)
    at, value = comment
    reader = _Comment(at, {ref.name: ref for ref in inputs}, {ref.name: ref for ref in outputs}, findings)
    return reader.read(value)


def _find(content: str, findings: Findings) -> tuple[Located, str] | None:
    """Find the comment; tell of others that were meant to be it, and of a second one."""
    found: tuple[Located, str] | None = None
    for match in _COMMENT.finditer(content):
        at = Located(None, content.count("\n", 0, match.start("name")) + 1)
        if match["name"] != _NAME:
            hint = did_you_mean(match["name"], [_NAME], otherwise=f"the only one is {_NAME}")
            findings.warn(at, f"{match['name']} is passed over", hint)
        elif found is None:
            found = at, match["value"]
        else:
            findings.refuse(
                at, f"{FILE_INVALID} - {_NAME} is given twice", suggestion=f"remove it; line {found[0].line} has one"
            )
    return found


def _unasked(
    inputs: Sequence[StreamRef], outputs: Sequence[StreamRef], nodes: Sequence[NodeConfig]
) -> ChatRoles | None:
    """Give the roles that the streams of a generative graph have without a word."""
    most_outputs = 2
    fits = len(inputs) == 1 and 0 < len(outputs) <= most_outputs and all(map(_is_text, (*inputs, *outputs)))
    if not fits or not any(ref.port.tag == "LOOPBACK" for node in nodes for ref in node.inputs):
        return None
    return ChatRoles(prompt=inputs[0].name, text=outputs[0].name, end=outputs[1].name if len(outputs) > 1 else "")


def _is_text(ref: StreamRef) -> bool:
    return ref.port.tag.startswith(PYTHON_TENSOR)


class _Comment:
    """Reads the roles that a comment gives to the streams of a graph."""

    def __init__(
        self, at: Located, inputs: dict[str, StreamRef], outputs: dict[str, StreamRef], findings: Findings
    ) -> None:
        self._at = at
        self._inputs = inputs
        self._outputs = outputs
        self._findings = findings
        self._roles: dict[str, str] = {}
        self._is_wrong = False

    def read(self, value: str) -> ChatRoles | None:
        """Read the comment; None if it cannot be used, which has been told."""
        for part in value.split():
            self._take(*part.partition("="))
        if not self._is_wrong:
            self._complete()
        return None if self._is_wrong else ChatRoles(**self._roles)

    def _take(self, role: str, equals: str, name: str) -> None:
        if not equals or not name:
            self._refuse("a part is no role=name", "role=name, such as text=completion", role + equals)
        elif role not in (*_OF_INPUTS, *_OF_OUTPUTS):
            self._refuse(f"{role!r} is no role of a chat", suggestion=suggest_key(role, (*_OF_INPUTS, *_OF_OUTPUTS)))
        elif role in self._roles:
            self._refuse(f"{role} is given twice", suggestion="remove one of them")
        else:
            self._give(role, name)

    def _give(self, role: str, name: str) -> None:
        kind, streams = ("input", self._inputs) if role in _OF_INPUTS else ("output", self._outputs)
        ref = streams.get(name)
        taken = next((other for other, stream in self._roles.items() if stream == name), "")
        if ref is None:
            known = ", ".join(streams) or "none"
            fix = did_you_mean(name, streams, otherwise=f"{kind}_stream has: {known}")
            self._refuse(f"{role}: the graph has no {kind} {name!r}", suggestion=fix)
        elif taken:
            self._refuse(f"{role}: {name!r} is {taken} already", suggestion="give each stream one role")
        elif not _is_text(ref):
            self._refuse(f"{role}: {name!r} carries no text", f"{PYTHON_TENSOR}:{name}", f"{ref.port.tag}:{name}")
        else:
            self._roles[role] = name

    def _complete(self) -> None:
        """Give the roles that the comment leaves out, where there is no doubt, and see that every input has one."""
        if not any(role in self._roles for role in _OF_INPUTS) and len(self._inputs) == 1:
            self._give("prompt", next(iter(self._inputs)))
        if "text" not in self._roles:
            free = [name for name in self._outputs if name not in self._roles.values()]
            if not free:
                self._refuse("no output is left for the text", suggestion=f"write {_EXAMPLE}")
                return
            self._give("text", free[0])
        nameless = [name for name in self._inputs if name not in self._roles.values()]
        if nameless and not self._is_wrong:
            self._refuse(
                f"a chat gives nothing to the input {nameless[0]!r}",
                suggestion="name it as prompt or messages, or remove the comment",
            )

    def _refuse(self, message: str, expected: str = "", found: str = "", *, suggestion: str = "") -> None:
        self._is_wrong = True
        self._findings.refuse(
            self._at, f"{FILE_INVALID} - {_NAME}: {message}", expected=expected, found=found, suggestion=suggestion
        )
