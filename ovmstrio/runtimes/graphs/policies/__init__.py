"""Input policies: when a node may run, and on which packets.

A policy looks at the input streams of one node.  ``next()`` takes the packets of one run off them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.runtimes.graphs.policies.aligned import TimestampAlignPolicy
from ovmstrio.runtimes.graphs.policies.fixed_size import FixedSizePolicy
from ovmstrio.runtimes.graphs.policies.mux_policy import MuxPolicy
from ovmstrio.runtimes.graphs.policies.settled import SettledPolicy
from ovmstrio.runtimes.graphs.policies.steps import CLOSE, Close, InputPolicy, NodeStep
from ovmstrio.runtimes.graphs.policies.sync_set import (
    BarrierPolicy,
    DefaultPolicy,
    EarlyClosePolicy,
    ImmediatePolicy,
    SyncSetPolicy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.runtimes.graphs.config.graph_config import PolicyConfig
    from ovmstrio.runtimes.graphs.input_streams import InputStream

__all__ = ["CLOSE", "Close", "InputPolicy", "NodeStep", "make_policy", "policy_names"]

_SUFFIX: Final = "InputStreamHandler"

_POLICIES: Final[Mapping[str, Callable[[Sequence[InputStream], PolicyConfig], InputPolicy]]] = {
    f"Default{_SUFFIX}": lambda streams, _: DefaultPolicy(streams),
    f"Immediate{_SUFFIX}": lambda streams, _: ImmediatePolicy(streams),
    f"EarlyClose{_SUFFIX}": lambda streams, _: EarlyClosePolicy(streams),
    f"Barrier{_SUFFIX}": lambda streams, _: BarrierPolicy(streams),
    f"Mux{_SUFFIX}": lambda streams, _: MuxPolicy(streams),
    f"SyncSet{_SUFFIX}": SyncSetPolicy.configured,
    f"FixedSize{_SUFFIX}": FixedSizePolicy.configured,
    f"TimestampAlign{_SUFFIX}": TimestampAlignPolicy.configured,
}


def policy_names() -> tuple[str, ...]:
    """List the input stream handlers that graph files may name."""
    return tuple(_POLICIES)


_SETTLED: Final[Mapping[str, Callable[[Sequence[InputStream]], InputPolicy]]] = {
    f"Default{_SUFFIX}": SettledPolicy.together,
    f"Immediate{_SUFFIX}": SettledPolicy.apart,
}


def make_policy(config: PolicyConfig, streams: Sequence[InputStream], *, processes_bounds: bool = False) -> InputPolicy:
    """Make the policy of one node of one instance, over its input streams in the order of tags.

    The configuration has been checked (``graphs.config.wiring``).  With ``processes_bounds`` the node runs without
    packets, too, where its policy can tell when (``NodeContract``).
    """
    if processes_bounds and streams and config.handler in _SETTLED:
        return _SETTLED[config.handler](streams)
    return _POLICIES[config.handler](streams, config)
