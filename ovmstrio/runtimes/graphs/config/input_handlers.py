"""Input stream handlers: what would be unknown, hang or crash at the first request is found before."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Final

from ovmstrio.config.findings import Findings, did_you_mean
from ovmstrio.config.located import Located
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
from ovmstrio.runtimes.graphs.config.graph_messages import INITIALIZATION, NOT_IMPLEMENTED
from ovmstrio.runtimes.graphs.config.stream_refs import InvalidName, parse_tag_index

__all__ = ["check_handlers"]

_SYNC_SET: Final = "SyncSetInputStreamHandler"
_ALONE: Final = frozenset({"ImmediateInputStreamHandler", "MuxInputStreamHandler"})
_LOOPBACK: Final = "LOOPBACK"
_INVALID: Final = f"{INITIALIZATION} - INVALID_ARGUMENT"


def check_handlers(node: NodeConfig, policies: Collection[str], findings: Findings) -> None:
    """Check the input stream handler of a node; a source has none to speak of."""
    policy = node.policy
    check = _HandlerCheck(node, findings)
    if policy.handler not in policies:
        fix = did_you_mean(policy.handler, policies, otherwise=f"there are: {', '.join(sorted(policies))}")
        details = f'{INITIALIZATION} - NOT_FOUND: "{policy.handler}" is not a registered input stream handler.'
        check.refuse(details, policy.line, found=policy.handler, fix=fix)
        return
    if policy.handler == _SYNC_SET:
        check.sync_sets()
    elif policy.handler == "TimestampAlignInputStreamHandler":
        check.align()
    elif policy.handler == "FixedSizeInputStreamHandler":
        check.fixed_size()
    elif policy.options is not None and getattr(policy.options, "batch_size", 1) != 1:
        found = str(policy.options.batch_size)
        details = f"{NOT_IMPLEMENTED} - batch_size of {policy.handler} is {found}"
        check.refuse(details, policy.line, expected="1", found=found, fix="remove batch_size")
    check.loopback()


class _HandlerCheck:
    def __init__(self, node: NodeConfig, findings: Findings) -> None:
        self.node = node
        self.findings = findings
        self.ports = {ref.port for ref in node.inputs}
        self.sets: list[set[Port]] = []

    def refuse(self, message: str, line: int, *, expected: str = "", found: str = "", fix: str = "") -> None:
        """Note that the graph cannot be built."""
        at = Located(None, line or self.node.line, f"{self.node.at.path}.input_stream_handler")
        self.findings.refuse(at, message, expected=expected, found=found, suggestion=fix)

    def sync_sets(self) -> None:
        """See that sets name inputs of the node, each once."""
        options, lines = self.node.policy.options, iter(self.node.policy.tag_lines)
        for declared in options.sync_set if options is not None else ():
            members: set[Port] = set()
            for text in declared.tag_index:
                line = next(lines, self.node.policy.line)
                port = self._port(text, "sync_set", line)
                if port is not None and port in chain(members, *self.sets):
                    details = f'{_INVALID}: sync_set names "{text}" again; an input is in one set only'
                    self.refuse(details, line, found=text, fix="remove it from one of them")
                elif port is not None:
                    members.add(port)
            self.sets.append(members)

    def align(self) -> None:
        """See that the base is an input of the node."""
        options, line, lines = self.node.policy.options, self.node.policy.line, iter(self.node.policy.tag_lines)
        if options is None or not options.HasField("timestamp_base_tag_index"):
            extension = "[mediapipe.TimestampAlignInputStreamHandlerOptions.ext]"
            fix = f'add options {{ {extension} {{ timestamp_base_tag_index: "TAG:0" }} }}'
            self.refuse(f"{_INVALID}: the handler needs timestamp_base_tag_index", line, fix=fix)
        else:
            self._port(options.timestamp_base_tag_index, "timestamp_base_tag_index", next(lines, line))

    def fixed_size(self) -> None:
        """See that queues can be shortened as asked."""
        options = self.node.policy.options
        if options is not None and not 1 <= options.target_queue_size <= options.trigger_queue_size:
            self.refuse(
                f"{_INVALID}: queues cannot be shortened to what is asked", self.node.policy.line,
                expected="1 <= target_queue_size <= trigger_queue_size",
                found=f"target_queue_size {options.target_queue_size}, trigger_queue_size {options.trigger_queue_size}",
            )  # fmt: skip

    def loopback(self) -> None:
        """See that a node does not wait for its own output before it makes the first."""
        loop = Port(_LOOPBACK, 0)
        if loop not in self.ports or len(self.ports) == 1 or self.node.policy.handler in _ALONE:
            return
        own_set = next((members for members in self.sets if loop in members), None)
        if own_set is None:
            own_set = self.ports - set(chain(*self.sets))
        if own_set == {loop}:
            return
        line = self.node.policy.line or next(ref.line for ref in self.node.inputs if ref.port == loop)
        option = '[mediapipe.SyncSetInputStreamHandlerOptions.ext] { sync_set { tag_index: "LOOPBACK:0" } }'
        self.refuse(
            f"{_INVALID}: every request would hang: LOOPBACK is awaited together with "
            f"{', '.join(str(port) for port in sorted(own_set - {loop}))}",
            line, expected="LOOPBACK in a sync set of its own", found=self.node.policy.handler,
            fix=f'use input_stream_handler {{ input_stream_handler: "{_SYNC_SET}" options {{ {option} }} }}',
        )  # fmt: skip

    def _port(self, text: str, option: str, line: int) -> Port | None:
        try:
            port = parse_tag_index(text)
        except InvalidName as error:
            self.refuse(f"{_INVALID}: {error.message}", line, expected=error.expected, found=text, fix=error.fix)
            return None
        if port in self.ports:
            return port
        names = [str(known) for known in sorted(self.ports)]
        self.refuse(
            f'{_INVALID}: {option} names "{text}", which is no input of the node', line,
            expected=f"one of its inputs: {', '.join(names) or 'none'}", found=text or "nothing",
            fix=did_you_mean(str(port), names),
        )  # fmt: skip
        return None
