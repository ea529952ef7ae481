"""Input policies for tests: written as in graph files, fed with packets by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ovmstrio.runtimes.graphs.config.graph_config import PolicyConfig, Port
from ovmstrio.runtimes.graphs.config.graph_file import read_graph
from ovmstrio.runtimes.graphs.input_streams import InputStream
from ovmstrio.runtimes.graphs.packets import Packet
from ovmstrio.runtimes.graphs.policies import CLOSE, make_policy


def policy_config(handler: str, options: str = "") -> PolicyConfig:
    """Read an input stream handler as a file has it; ``options`` is the text of its own message."""
    extension = f"options {{ [mediapipe.{handler}InputStreamHandlerOptions.ext] {{ {options} }} }}" if options else ""
    text = f"""
        node {{
          calculator: "PassThroughCalculator" input_stream: "A:a" output_stream: "A:b"
          input_stream_handler {{ input_stream_handler: "{handler}InputStreamHandler" {extension} }}
        }}
    """
    return read_graph(text, "graph.pbtxt").nodes[0].policy


class Fed:
    """A policy over inputs named by tag.

    Attributes:
        streams: the inputs by tag.
        settled: what the last run was told of how far the inputs are known, by tag.
    """

    def __init__(
        self, handler: str, tags: Sequence[str], options: str = "", *, limit: int = -1, processes_bounds: bool = False
    ) -> None:
        self.streams = {tag: InputStream(tag.lower(), Port(tag, 0), limit=limit) for tag in tags}
        self.settled: dict[str, int] = {}
        self._policy = make_policy(
            policy_config(handler, options), list(self.streams.values()), processes_bounds=processes_bounds
        )

    def push(self, **packets: int | Sequence[int]) -> None:
        """Put packets on inputs by tag, at these timestamps; the value is the timestamp."""
        for tag, timestamps in packets.items():
            for timestamp in [timestamps] if isinstance(timestamps, int) else timestamps:
                self.put(tag, timestamp, timestamp)

    def put(self, tag: str, timestamp: int, value: Any) -> None:
        """Put one packet on an input."""
        self.streams[tag].push(Packet(value, timestamp))
        self._policy.arrived()

    def advance(self, tag: str, bound: int) -> None:
        """Promise that nothing below ``bound`` comes on an input."""
        self.streams[tag].advance(bound)
        self._policy.arrived()

    def close(self, *tags: str) -> None:
        """End inputs."""
        for tag in tags:
            self.streams[tag].close()
        self._policy.arrived()

    def waiting(self, tag: str) -> list[int]:
        """Give the timestamps that wait on an input."""
        return [packet.timestamp for packet in self.streams[tag].queue]

    def next(self) -> tuple[int, Mapping[str, Any]] | str | None:
        """Take the next run as (timestamp, values by tag), ``"close"``, or None where the node has to wait."""
        step = self._policy.next()
        if step is None:
            return None
        if step is CLOSE:
            return "close"
        self.settled = {port.tag: timestamp for port, timestamp in step.settled.items()}
        return step.timestamp, {port.tag: value for port, value in step.inputs.items()}

    def runs(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Take every run that is possible now."""
        return list(self._runs())

    def _runs(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        while True:
            step = self.next()
            if step is None or isinstance(step, str):
                return
            yield step
