"""Fuzz campaign: sends numbered messages, and checks each answer and the state of the server after each batch."""

from __future__ import annotations

import json
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

from ovmstrio.encoding.messages import message_class
from tests.fuzz.grpc_calls import INFER, GrpcLane, exchange_raw_http2, grpc_message, infer_request, raw_http2_message
from tests.fuzz.http_requests import HttpLane, exchange_raw_http, http_message, raw_http_message
from tests.fuzz.messages import Message, Outcome, Transport, Violation
from tests.support import ir
from tests.support.all_kinds import ANY_HANDLER, ANY_OPS, write_all_kinds
from tests.support.bare_http2 import BareConnection, ConnectionEnded
from tests.support.tiny_llm import write_tiny_folder

BATCH: Final = 100
LONGEST: Final = 3_000
_ENTRY: Final = re.compile(r"(?m)^(?=\d{4}-\d\d-\d\dT)")
_DIGITS: Final = re.compile(r"\d+")
_ROW: Final = np.arange(10, dtype=np.float32).reshape(1, 10)

_MAKERS: Final = (grpc_message, http_message, raw_http2_message, raw_http_message)
_WEIGHTS: Final = (46, 46, 4, 4)


@dataclass(slots=True)
class Report:
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    messages: int = 0

    def add(self, other: Report) -> None:
        self.counts += other.counts
        self.violations += other.violations
        self.messages += other.messages

    def __str__(self) -> str:
        interfaces = sorted({interface for interface, _ in self.counts})
        lines = [f"{self.messages} messages, {len(self.violations)} violations"]
        for interface in interfaces:
            counts = Counter({kind: count for (of, kind), count in self.counts.items() if of == interface})
            lines.append(f"  {interface}: " + ", ".join(f"{kind} x{count}" for kind, count in counts.most_common()))
        return "\n".join([*lines, *map(str, self.violations)])


def deliver(lanes: tuple[GrpcLane, HttpLane], ports: tuple[int, int], messages: Sequence[Message]) -> list[Outcome]:
    grpc_lane, http_lane = lanes
    calls = [message for message in messages if message.transport is Transport.GRPC]
    requests = [message for message in messages if message.transport is Transport.HTTP]
    grpc_lane.begin(calls)
    http_lane.begin(requests)
    raw = {
        message.number: exchange_raw_http2(ports[0], message.body)
        if message.transport is Transport.RAW_HTTP2
        else exchange_raw_http(ports[1], message.body)
        for message in messages
        if message.transport in {Transport.RAW_HTTP, Transport.RAW_HTTP2}
    }
    results = zip([*calls, *requests], [*grpc_lane.end(calls), *http_lane.end(requests)], strict=True)
    outcomes = raw | {message.number: outcome for message, outcome in results}
    return [outcomes[message.number] for message in messages]


def make_message(number: int) -> Message:
    random = Random(number)
    (maker,) = random.choices(_MAKERS, _WEIGHTS)
    return maker(random, number)


class Campaign:
    def __init__(self, ports: tuple[int, int], log: Callable[[], str] = str) -> None:
        self._ports = ports
        self._log = log

    def run(self, numbers: range) -> Report:
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
            report.counts.update((message.interface, kind) for kind in outcome.kinds)
            only = range(message.number, message.number + 1)
            report.violations += [Violation(only, f"{fault}\n    {message}") for fault in outcome.faults]
        report.messages += len(messages)
        report.violations += [Violation(numbers, fault) for fault in self.faults_afterwards()]

    def faults_afterwards(self) -> Iterable[str]:
        for traceback in tracebacks(self._log()):
            yield f"a traceback in the log: {traceback}"
        try:
            yield from self._ask_plainly()
        except Exception as error:  # noqa: BLE001 - any error means that the server does not answer
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
        counts = httpx.post(url, json={"inputs": [tensor]}, timeout=20, trust_env=False).json()
        if counts["outputs"][0]["data"] != (_ROW + 1).ravel().tolist():
            yield f"a plain request was answered wrongly: {counts}"


def tracebacks(written: str) -> list[str]:
    entries = _ENTRY.split(written)
    found = {_DIGITS.sub("", entry.rstrip().rpartition("\n")[2]): entry for entry in entries if "Traceback (" in entry}
    return [entry if len(entry) < LONGEST else f"{entry[:500]}\n...\n{entry[-LONGEST:]}" for entry in found.values()]


def new_in_log(log: Path) -> Callable[[], str]:

    def read() -> str:
        written = log.read_text(errors="replace")
        os.truncate(log, 0)
        return written

    return read


def run_numbers(ports: tuple[int, int], numbers: range) -> Report:
    return Campaign(ports).run(numbers)


def write_fuzzed(folder: Path) -> Path:
    config = write_all_kinds(folder, handler=ANY_HANDLER, ops=ANY_OPS)
    models: dict[str, tuple[Any, dict[str, Any]]] = {
        "dynamic": (ir.dynamic(), {}),
        "strings": (ir.string_passthrough(), {}),
        "stateful": (ir.accumulator(), {"stateful": True, "max_sequence_number": 50}),
    }
    document = json.loads(config.read_text())
    document["model_config_list"] += [
        {"config": {"name": name, "base_path": str(ir.save(model, folder / "repository", name)), **options}}
        for name, (model, options) in models.items()
    ]
    text_model = {"name": "chat", "base_path": str(write_tiny_folder(folder / "chat")), "max_tokens_limit": 50}
    document["text_model_config_list"] = [{"config": text_model}]
    config.write_text(json.dumps(document, indent=1))
    return config
