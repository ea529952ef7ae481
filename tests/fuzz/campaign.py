"""Sends the messages of many numbers to a server, and judges what it says to each and how it is afterwards.

::

    numbers ─> make_message ─> lanes (calls, requests, raw connections) ─> outcomes ─> counts and violations
                                                                             │
                              behind each batch: a plain call is answered rightly, nothing is in the log
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx
import numpy as np

from ovmstrio.protocol.descriptors import message_class
from tests.fuzz.grpc_doors import INFER, grpc_message, infer_request, raw_http2_message
from tests.fuzz.grpc_lane import GrpcLane, tell_raw_http2
from tests.fuzz.http_doors import http_message, raw_http_message
from tests.fuzz.http_lane import HttpLane, tell_raw_http
from tests.fuzz.messages import Message, Outcome, Transport, Violation
from tests.support.bare_http2 import BareConnection, ConnectionEnded

BATCH: Final = 100
LONGEST: Final = 3_000
_ENTRY: Final = re.compile(r"(?m)^(?=\d{4}-\d\d-\d\dT)")
_DIGITS: Final = re.compile(r"\d+")
_ROW: Final = np.arange(10, dtype=np.float32).reshape(1, 10)

_MAKERS: Final = (grpc_message, http_message, raw_http2_message, raw_http_message)
_WEIGHTS: Final = (46, 46, 4, 4)


@dataclass(slots=True)
class Report:
    """What came of many messages: how often each door said what, and what must not have been."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    messages: int = 0

    def add(self, other: Report) -> None:
        """Count another part."""
        self.counts += other.counts
        self.violations += other.violations
        self.messages += other.messages

    def __str__(self) -> str:
        doors = sorted({door for door, _ in self.counts})
        lines = [f"{self.messages} messages, {len(self.violations)} violations"]
        for door in doors:
            said = Counter({kind: count for (of, kind), count in self.counts.items() if of == door})
            lines.append(f"  {door}: " + ", ".join(f"{kind} x{count}" for kind, count in said.most_common()))
        return "\n".join([*lines, *map(str, self.violations)])


def deliver(lanes: tuple[GrpcLane, HttpLane], ports: tuple[int, int], messages: Sequence[Message]) -> list[Outcome]:
    """Send messages to the ports of gRPC and REST; gives what came of each, in their order."""
    grpc_lane, http_lane = lanes
    calls = [message for message in messages if message.transport is Transport.GRPC]
    requests = [message for message in messages if message.transport is Transport.HTTP]
    grpc_lane.begin(calls)
    http_lane.begin(requests)
    raw = {
        message.number: tell_raw_http2(ports[0], message.body)
        if message.transport is Transport.RAW_HTTP2
        else tell_raw_http(ports[1], message.body)
        for message in messages
        if message.transport in {Transport.RAW_HTTP, Transport.RAW_HTTP2}
    }
    told = zip([*calls, *requests], [*grpc_lane.end(calls), *http_lane.end(requests)], strict=True)
    outcomes = raw | {message.number: outcome for message, outcome in told}
    return [outcomes[message.number] for message in messages]


def make_message(number: int) -> Message:
    random = Random(number)
    (maker,) = random.choices(_MAKERS, _WEIGHTS)
    return maker(random, number)


class Campaign:
    """Messages to one server.

    Args:
        ports: of gRPC and REST.
        log: gives what the server has written since it was asked last.
    """

    def __init__(self, ports: tuple[int, int], log: Callable[[], str] = str) -> None:
        self._ports = ports
        self._log = log

    def run(self, numbers: range) -> Report:
        """Send the messages of some numbers, a batch at a time."""
        report = Report()
        lanes = GrpcLane(self._ports[0]), HttpLane(self._ports[1])
        try:
            for start in range(numbers.start, numbers.stop, BATCH):
                batch = range(start, min(start + BATCH, numbers.stop))
                self._run_batch(lanes, batch, report)
        except (OSError, ConnectionEnded) as error:
            report.violations.append(Violation(batch, f"the server is gone: {error!r}"))
        finally:
            for lane in lanes:
                lane.close()
        return report

    def _run_batch(self, lanes: tuple[GrpcLane, HttpLane], numbers: range, report: Report) -> None:
        messages = [make_message(number) for number in numbers]
        for message, outcome in zip(messages, deliver(lanes, self._ports, messages), strict=True):
            report.counts.update((message.door, kind) for kind in outcome.kinds)
            only = range(message.number, message.number + 1)
            report.violations += [Violation(only, f"{fault}\n    {message}") for fault in outcome.faults]
        report.messages += len(messages)
        report.violations += [Violation(numbers, fault) for fault in self.faults_afterwards()]

    def faults_afterwards(self) -> Iterable[str]:
        """Look at the log, and ask the server something plain over both protocols."""
        for told in tracebacks(self._log()):
            yield f"a traceback in the log: {told}"
        try:
            yield from self._ask_plainly()
        except Exception as error:  # noqa: BLE001 - whatever it is, the server does not answer
            yield f"the server does not answer: {error!r}"

    def _ask_plainly(self) -> Iterable[str]:
        with BareConnection(self._ports[0], timeout=20) as connection:
            answer = connection.ask(INFER, infer_request("model", b=_ROW).SerializeToString())
        if answer.status != "0":
            yield f"a plain call was refused: {answer.headers}"
        given = message_class("inference.ModelInferResponse").FromString(answer.message)
        if list(given.raw_output_contents) != [(_ROW + 1).tobytes()]:
            yield f"a plain call was answered wrongly: {given}"
        tensor: dict[str, Any] = {"name": "b", "shape": [1, 10], "datatype": "FP32", "data": _ROW.ravel().tolist()}
        url = f"http://127.0.0.1:{self._ports[1]}/v2/models/model/infer"
        said = httpx.post(url, json={"inputs": [tensor]}, timeout=20, trust_env=False).json()
        if said["outputs"][0]["data"] != (_ROW + 1).ravel().tolist():
            yield f"a plain request was answered wrongly: {said}"


def tracebacks(written: str) -> list[str]:
    """Find the tracebacks in a log whose lines begin with the time, each with its line: one of those that end alike."""
    entries = _ENTRY.split(written)
    found = {_DIGITS.sub("", entry.rstrip().rpartition("\n")[2]): entry for entry in entries if "Traceback (" in entry}
    return [entry if len(entry) < LONGEST else f"{entry[:500]}\n...\n{entry[-LONGEST:]}" for entry in found.values()]


def new_in_log(log: Path) -> Callable[[], str]:
    """Read a log from where it was read last; it is emptied, so that it does not fill the disk."""

    def read() -> str:
        written = log.read_text(errors="replace")
        os.truncate(log, 0)
        return written

    return read


def run_numbers(ports: tuple[int, int], numbers: range) -> Report:
    """Send the messages of some numbers, in a process that does nothing else."""
    return Campaign(ports).run(numbers)
