"""What a policy answers."""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from ovmstrio.runtimes.graphs.timestamps import DONE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.runtimes.graphs.config.graph_config import Port
    from ovmstrio.runtimes.graphs.input_streams import InputStream

__all__ = ["CLOSE", "Close", "InputPolicy", "NodeStep", "Step", "earliest"]


class Close(enum.Enum):
    """The type of :data:`CLOSE`."""

    CLOSE = enum.auto()


CLOSE: Final = Close.CLOSE
"""All inputs are done: the node is to be closed."""


class NodeStep(NamedTuple):
    """One run of the node: its timestamp and the values by port, in the order of tags.

    ``settled`` tells by port how far each input is known, where the policy looks for that.
    """

    timestamp: int
    inputs: dict[Port, Any]
    settled: Mapping[Port, int] = MappingProxyType({})


Step = NodeStep | Literal[Close.CLOSE] | None
"""None: not ready."""


class InputPolicy:
    """The input policy of one node of one instance."""

    def __init__(self, streams: Sequence[InputStream]) -> None:
        self._streams = streams

    def next(self) -> Step:
        """Take the packets of the next run, if the node may run.

        Raises:
            NodeFailure: the packets make no sense to the policy.
        """
        raise NotImplementedError

    def arrived(self) -> None:
        """Note that packets or bounds have come; some policies drop packets now."""

    def bound(self) -> int:
        """Give the smallest timestamp that a run to come may have, ``DONE`` if there will be none."""
        return earliest(self._streams)


def earliest(streams: Sequence[InputStream]) -> int:
    """Give the smallest timestamp of a packet that waits on these streams or may still come."""
    return min((stream.earliest for stream in streams), default=DONE)
