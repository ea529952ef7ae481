"""Clients of servers of two workers: connections to each, calls of their models, and their metrics."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import httpx
import numpy as np
import tritonclient.grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import OvmsProcess
from tests.support.waits import WAIT_SECONDS, until

ROW: Final = {"inputs": [{"name": "b", "shape": [1, 10], "datatype": "FP32", "data": [1.0] * 10}]}
"""A request of the model that adds one to FP32 ``b`` [1,10]."""


def pid_of(client: httpx.Client) -> int:
    return int(client.get("/who").raise_for_status().json()["pid"])


@contextmanager
def each_worker(server: OvmsProcess, *, uds: str | None = None, **headers: str) -> Iterator[list[httpx.Client]]:
    """Open a connection to each of two workers, and return their clients.

    A worker that still starts gets no connections, so connections are opened until both workers have one.
    """
    with ExitStack() as stack:
        by_worker: dict[Any, httpx.Client] = {}

        def both_answer() -> bool:
            transport = None if uds is None else httpx.HTTPTransport(uds=uds)
            client = httpx.Client(base_url=server.rest, timeout=WAIT_SECONDS, transport=transport, headers=headers)
            stack.enter_context(client)
            by_worker.setdefault(client.get("/console/api/server").raise_for_status().json()["worker"], client)
            return len(by_worker) == 2

        until(both_answer)
        yield [by_worker[number] for number in sorted(by_worker)]


def worker_pids(server: OvmsProcess) -> set[int]:
    with each_worker(server) as clients:
        return {pid_of(client) for client in clients}


@contextmanager
def ending_worker(server: OvmsProcess) -> Iterator[None]:
    """Wait after the block until the parent has noticed that a worker has ended.

    Until then the parent may hand a new connection over to that worker, and the connection is lost.
    """
    ended = server.printed_so_far().count("worker exited")
    yield
    until(lambda: server.printed_so_far().count("worker exited") > ended)


def kill_worker(server: OvmsProcess, pid: int) -> None:
    """Kill a worker, and wait until the parent has noticed."""
    with ending_worker(server):
        os.kill(pid, signal.SIGKILL)


def sample(server: OvmsProcess, metric: str, /, **labels: str) -> float:
    return sum(
        each.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for each in family.samples
        if each.name == metric and labels.items() <= each.labels.items()
    )


def infer_by_grpc(client: Any, model: str) -> list[float]:
    given = tritonclient.grpc.InferInput("b", [1, 10], "FP32")
    given.set_data_from_numpy(np.ones((1, 10), np.float32))
    found: list[float] = client.infer(model, [given], client_timeout=WAIT_SECONDS).as_numpy("a")[0].tolist()
    return found


def step(client: httpx.Client, identity: int | str = 0, *, model: str = "acc", **flags: bool) -> httpx.Response:
    """Send a step of a sequence to a model that sums; ``start`` and ``end`` are flags."""
    row = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}
    parameters = {"sequence_id": identity} | {f"sequence_{name}": value for name, value in flags.items()}
    return client.post(f"/v2/models/{model}/infer", json={"inputs": [row], "parameters": parameters})


def sum_of(answer: httpx.Response) -> tuple[float, Any]:
    outputs = {each["name"]: each["data"] for each in answer.raise_for_status().json()["outputs"]}
    (identity,) = outputs.pop("sequence_id")
    ((first, second),) = outputs.values()
    assert second == 2 * first
    return float(first), identity


def end_sequences(client: httpx.Client, model: str = "acc") -> None:
    for each in client.get(f"/v2/models/{model}/sequences").raise_for_status().json()["sequences"]:
        step(client, each["id"], model=model, end=True).raise_for_status()
