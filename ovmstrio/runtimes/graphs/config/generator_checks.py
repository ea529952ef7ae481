"""Generators in a graph: which of them feed each other, or are waited for together, with what comes of that.

A node may have a generator where it has a ``LOOPBACK``; whether it yields, only its code knows.  So what can go well if
some node does not is a warning, and what cannot is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ovmstrio.config.findings import Findings
from ovmstrio.runtimes.graphs.config.graph_config import GraphConfig, NodeConfig, Port, StreamRef
from ovmstrio.runtimes.graphs.config.graph_messages import INITIALIZATION

__all__ = ["check_generators"]

_LOOPBACK: Final = Port("LOOPBACK", 0)
_WAITING: Final = frozenset({"DefaultInputStreamHandler", "EarlyCloseInputStreamHandler", "SyncSetInputStreamHandler"})


def check_generators(graph: GraphConfig, findings: Findings) -> None:
    """Tell of each node that generators feed in a way that does not go well."""
    origins = _origins(graph)
    for node in graph.nodes:
        _check_own_loop(node, findings)
        fed = [(ref, origins.get(ref.name, frozenset())) for ref in _data(node)]
        above = sorted({name for _, names in fed for name in names})
        if above and _has_loop(node):
            ref = next(ref for ref, names in fed if names)
            _warn_of_row(node, ref, above, findings)
        elif len({names for _, names in fed}) > 1 and node.policy.handler in _WAITING:
            ref = next(ref for ref, names in fed if names)
            _warn_of_lengths(node, ref, above, findings)


def _has_loop(node: NodeConfig) -> bool:
    return any(ref.port == _LOOPBACK for ref in node.inputs)


def _data(node: NodeConfig) -> list[StreamRef]:
    return [ref for ref in node.sorted_inputs if ref.port != _LOOPBACK and ref.port not in node.back_edges]


def _origins(graph: GraphConfig) -> Mapping[str, frozenset[str]]:
    """Give, for each stream, the nodes with a loopback that its packets come from; there may be circles."""
    found: dict[str, frozenset[str]] = {}
    is_settled = False
    while not is_settled:
        is_settled = True
        for node in graph.nodes:
            above = frozenset[str]().union(*(found.get(ref.name, frozenset()) for ref in _data(node)))
            own = frozenset({node.canonical_name}) if _has_loop(node) else frozenset[str]()
            for ref in node.outputs:
                if found.get(ref.name, frozenset()) != above | own:
                    found[ref.name] = above | own
                    is_settled = False
    return found


def _check_own_loop(node: NodeConfig, findings: Findings) -> None:
    read = [ref for ref in node.inputs if ref.port == _LOOPBACK]
    made = {ref.name for ref in node.outputs if ref.port == _LOOPBACK}
    for ref in read:
        if made and ref.name not in made:
            findings.refuse(
                ref.at,
                f'{INITIALIZATION} - INVALID_ARGUMENT: the generator of node "{node.canonical_name}" would stop after '
                "its first value: LOOPBACK comes in as another stream than it goes out",
                expected=f"LOOPBACK:{min(made)}",
                found=f"LOOPBACK:{ref.name}",
                suggestion="give LOOPBACK the same name on both sides of the node",
            )


def _warn_of_row(node: NodeConfig, ref: StreamRef, above: list[str], findings: Findings) -> None:
    findings.warn(
        ref.at,
        f'node "{node.canonical_name}" has a LOOPBACK and is fed by {_named(above)}, which has one, too: where both '
        "yield several values, the second value of the first comes while the generator of the second runs, and the "
        "call fails with RESOURCE_EXHAUSTED",
        "let one of them yield a single value, or return lists",
    )


def _warn_of_lengths(node: NodeConfig, ref: StreamRef, above: list[str], findings: Findings) -> None:
    findings.warn(
        ref.at,
        f'node "{node.canonical_name}" waits for inputs that {_named(above)} may make more of than others: values '
        "without a partner at their timestamp wait for the next request, or for the end of the stream",
        'use input_stream_handler { input_stream_handler: "ImmediateInputStreamHandler" }, and look at names of inputs',
    )


def _named(names: list[str]) -> str:
    return " and ".join(f'"{name}"' for name in names)
