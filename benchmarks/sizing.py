"""Figures of docs/sizing.md: CPU of calls, memory of models, neighbours, and overload.

python -m benchmarks.sizing [cpu] [memory] [neighbours] [overload] [goodput]     all without a name

CPU and memory are those of the server's process, so that other load on the machine matters little. The load generator
is grpcio in threads of this process.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import httpx
import numpy as np

from benchmarks.matrix.networks import input_of, network
from benchmarks.models import F32, write_repository
from benchmarks.processes import cpu_of_tree, ovms
from benchmarks.report import machine
from ovmstrio.encoding.messages import message_class
from tests.support.projects import write_project

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.processes import Server

_METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"
_SECONDS: Final = 3.0


def _request(model: str, size: str) -> bytes:
    name, array = input_of(network(size, is_dynamic=True))
    request = message_class("inference.ModelInferRequest")(model_name=model)
    request.inputs.add(name=name, datatype="FP32", shape=array.shape)
    request.raw_input_contents.append(array.tobytes())
    content: bytes = request.SerializeToString()
    return content


@contextmanager
def _callers(server: Server, request: bytes, count: int) -> Iterator[list[float]]:
    """Call in ``count`` threads during the block; yield the seconds of each call."""
    taken: list[float] = []
    over = threading.Event()

    def repeat() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            infer = channel.unary_unary(_METHOD)
            while not over.is_set():
                begun = time.perf_counter()
                infer(request, timeout=60)
                taken.append(time.perf_counter() - begun)

    threads = [threading.Thread(target=repeat) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield taken
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _p99_ms(taken: list[float]) -> float:
    return float(np.percentile(taken, 99)) * 1e3


def _print_head(*columns: str) -> None:
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)


def cpu() -> None:
    """Print the CPU of a call of models of some sizes, and of a handler, over gRPC and REST."""
    sizes = ["10 us", "1 ms", "10 ms"]
    names = {size: size.replace(" ", "-") for size in sizes}
    _print_head("call", "CPU of a call in ms", "calls per second of a core")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {names[size]: network(size, is_dynamic=True) for size in sizes}
        config = write_repository(folder, models, dict.fromkeys(models, F32))
        write_project(folder / "echo", "class Handler:\n    def handle_post(self, payload):\n        return payload\n")
        document = json.loads(config.read_text())
        document["handler_config_list"] = [{"name": "echo", "path": str(folder / "echo")}]
        config.write_text(json.dumps(document))
        with ovms(config) as server:
            for size in sizes:
                request = _request(names[size], size)

                def grpc_load(request: bytes = request) -> int:
                    with _callers(server, request, 4) as taken:
                        time.sleep(_SECONDS)
                    return len(taken)

                _print_cpu(f"model of {size}, gRPC", server, grpc_load)
            rest = partial(_post, server)
            row = {"name": "b", "shape": [1, 10], "datatype": "FP32", "data": [1.0] * 10}
            _print_cpu("model of 10 us, REST JSON", server, partial(rest, "/v2/models/10-us/infer", {"inputs": [row]}))
            _print_cpu("Python handler, REST JSON", server, partial(rest, "/echo", [1, 2, 3]))


def _post(server: Server, path: str, document: Any) -> int:
    content = json.dumps(document).encode()
    count, ends = 0, time.monotonic() + _SECONDS
    with httpx.Client(
        base_url=f"http://127.0.0.1:{server.rest}", headers={"content-type": "application/json"}
    ) as client:
        while time.monotonic() < ends:
            client.post(path, content=content).raise_for_status()
            count += 1
    return count


def _print_cpu(what: str, server: Server, load: Callable[[], int]) -> None:
    load()
    costs = []
    for _ in range(3):
        before = cpu_of_tree(server.process)
        count = load()
        costs.append((cpu_of_tree(server.process) - before) / count)
    cost = statistics.median(costs)
    print(f"| {what} | {cost * 1e3:.3g} | {1 / cost:.0f} |", flush=True)


def memory() -> None:
    """Print the resident memory of servers with some numbers of models."""
    _print_head("models", "weights of each", "resident", "each further one")
    for size, counts in (("10 us", (1, 50)), ("1 ms", (1, 20)), ("75 ms", (1, 4))):
        found = []
        for count in counts:
            with tempfile.TemporaryDirectory() as name:
                model = network(size, is_dynamic=True)
                models = {f"m{number}": model for number in range(count)}
                with ovms(write_repository(Path(name), models, dict.fromkeys(models, F32))) as server:
                    for each in models:
                        with _callers(server, _request(each, size), 1):
                            time.sleep(0.1)
                    time.sleep(5)
                    found.append(server.resident_mb)
                weights = sum(path.stat().st_size for path in Path(name).rglob("*.bin")) / count / 1e6
        each_mb = (found[1] - found[0]) / (counts[1] - counts[0])
        counted = f"{counts[0]}, {counts[1]} of {size}"
        resident = f"{found[0]:.0f}, {found[1]:.0f} MB"
        print(f"| {counted} | {weights:.3g} MB | {resident} | {each_mb:.3g} MB |", flush=True)


def neighbours() -> None:
    """Print p99 of a trivial model while four clients call one of 75 ms, with settings of the latter."""
    settings: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "no setting": ({}, {}),
        '"max_concurrency": 1': ({}, {"max_concurrency": 1}),
        '"INFERENCE_NUM_THREADS": 1': ({"INFERENCE_NUM_THREADS": 1}, {}),
        "both": ({"INFERENCE_NUM_THREADS": 1}, {"max_concurrency": 1}),
    }
    _print_head("settings of the heavy model", "p99 of the trivial one", "its calls", "calls of the heavy one")
    trivial, heavy = _request("trivial", "10 us"), _request("heavy", "75 ms")
    models = {"trivial": network("10 us", is_dynamic=True), "heavy": network("75 ms", is_dynamic=True)}
    with ExitStack() as stack:
        servers = {}
        for what, (plugin, entry) in settings.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            config = write_repository(folder, models, {"trivial": F32, "heavy": {**F32, **plugin}})
            document = json.loads(config.read_text())
            for each in document["model_config_list"]:
                if each["config"]["name"] == "heavy":
                    each["config"].update(entry)
            config.write_text(json.dumps(document))
            servers[what] = stack.enter_context(ovms(config))
        figures: dict[str, list[tuple[float, int, int]]] = {what: [] for what in ("alone", *servers)}
        for _ in range(5):
            with _callers(servers["no setting"], trivial, 1) as taken:
                time.sleep(_SECONDS)
            figures["alone"].append((_p99_ms(taken), len(taken), 0))
            for what, server in servers.items():
                with _callers(server, heavy, 4) as others, _callers(server, trivial, 1) as taken:
                    time.sleep(_SECONDS)
                figures[what].append((_p99_ms(taken), len(taken), len(others)))
    for what, rounds in figures.items():
        p99, count, other = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {what} | {p99:.1f} ms | {count / _SECONDS:.0f}/s | {other / _SECONDS:.1f}/s |", flush=True)


_SLEEPING: Final = """
import time

class Handler:
    def handle_post(self, payload):
        time.sleep(0.05)
        return payload
"""


def overload() -> None:
    """Print the outcome of calls at one and a half times the capacity, with deadlines of a second."""
    settings: dict[str, dict[str, Any]] = {
        '"max_queue": 1000': {"max_queue": 1000},
        '"max_queue": 100': {"max_queue": 100},
        '"max_queue_time": 0.5': {"max_queue": 1000, "max_queue_time": 0.5},
        '"max_queue_time": 0.2': {"max_queue": 1000, "max_queue_time": 0.2},
    }
    _print_head("limit", "answered", "refused at once", "given up by the client", "p99 of answered ones")
    for what, limits in settings.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_project(folder / "sleeps", _SLEEPING)
            entry = {"name": "sleeps", "path": str(folder / "sleeps"), "max_concurrency": 1, **limits}
            config = folder / "config.json"
            config.write_text(json.dumps({"model_config_list": [], "handler_config_list": [entry]}))
            with ovms(config) as server:
                call = partial(_post_once, server, "/sleeps", b"1", _JSON)
                outcomes, taken = _open_loop(call, rate=30, seconds=15, deadline=1.0)
            total = sum(outcomes.values())
            parts = [f"{outcomes[each]} of {total}" for each in ("answered", "refused", "given up")]
            print(f"| {what} | {' | '.join(parts)} | {_p99_ms(taken):.0f} ms |", flush=True)


_COMPUTING: Final = """
import time

class Handler:
    def handle_post(self, payload):
        ends = time.thread_time() + 0.015
        while time.thread_time() < ends:
            pass
        return payload
"""
_OVERLOAD_SECONDS: Final = 20.0
_CAPACITY_SECONDS: Final = 5.0


def goodput() -> None:
    """Print the calls answered within a second at twice the capacity, without any limit."""
    _print_head("service without limits", "capacity", "answered of twice as many", "goodput of capacity", "p99")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        config = write_repository(folder, {"m": network("10 ms", is_dynamic=True)}, {"m": F32})
        write_project(folder / "computes", _COMPUTING)
        document = json.loads(config.read_text())
        document["handler_config_list"] = [{"name": "computes", "path": str(folder / "computes")}]
        config.write_text(json.dumps(document))
        server = stack.enter_context(ovms(config))
        infer = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{server.grpc}")).unary_unary(_METHOD)
        body, headers = _binary_request("10 ms")
        calls: dict[str, _Call] = {
            "Python handler of 15 ms, REST": partial(_post_once, server, "/computes", b"1", _JSON),
            "model of 10 ms, REST": partial(_post_once, server, "/v2/models/m/infer", body, headers),
            "model of 10 ms, gRPC": partial(_infer_once, infer, _request("m", "10 ms")),
        }
        for what, call in calls.items():
            # Without pause, load shedding for the previous calls might still apply.
            time.sleep(11)
            capacity = _closed_loop(call, callers=8, seconds=_CAPACITY_SECONDS)
            begun = time.monotonic()
            outcomes, taken = _open_loop(call, rate=2 * capacity, seconds=_OVERLOAD_SECONDS, deadline=1.0)
            rate = outcomes["answered"] / (time.monotonic() - begun)
            parts = f"{capacity:.0f}/s | {rate:.0f}/s | {rate / capacity:.2f} | {_p99_ms(taken):.0f} ms"
            print(f"| {what} | {parts} |", flush=True)


_Call = Callable[[float], str]
"""Makes a call with a timeout in seconds, and returns its outcome."""
_JSON: Final = {"content-type": "application/json"}


def _binary_request(size: str) -> tuple[bytes, dict[str, str]]:
    name, array = input_of(network(size, is_dynamic=True))
    tensor = {"name": name, "shape": array.shape, "datatype": "FP32", "parameters": {"binary_data_size": array.nbytes}}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(len(head))}
    return head + array.tobytes(), headers


def _post_once(server: Server, path: str, body: bytes, headers: dict[str, str], timeout: float) -> str:
    with closing(HTTPConnection("127.0.0.1", server.rest, timeout=timeout)) as connection:
        try:
            connection.request("POST", path, body, headers)
            status = connection.getresponse().status
        except TimeoutError:
            return "given up"
    return "answered" if status == HTTPStatus.OK else "refused"


def _infer_once(infer: grpc.UnaryUnaryMultiCallable, request: bytes, timeout: float) -> str:
    try:
        infer(request, timeout=timeout)
    except grpc.RpcError as error:
        return "given up" if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else "refused"
    return "answered"


def _closed_loop(call: _Call, *, callers: int, seconds: float) -> float:
    """Return the calls per second of a number of callers."""
    ends = time.monotonic() + seconds
    counts = [0] * callers

    def repeat(caller: int) -> None:
        while time.monotonic() < ends:
            counts[caller] += call(60.0) == "answered"

    _join([threading.Thread(target=repeat, args=(caller,)) for caller in range(callers)])
    return sum(counts) / seconds


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _open_loop(call: _Call, *, rate: float, seconds: float, deadline: float) -> tuple[Counter[str], list[float]]:
    """Send calls at random times, each in a thread, whatever becomes of the others."""
    outcomes: Counter[str] = Counter()
    taken: list[float] = []
    random = np.random.default_rng(0)

    def once() -> None:
        begun = time.perf_counter()
        outcome = call(deadline)
        outcomes[outcome] += 1
        if outcome == "answered":
            taken.append(time.perf_counter() - begun)

    threads = []
    due = time.monotonic()
    ends = due + seconds
    while due < ends:
        threads.append(threading.Thread(target=once))
        threads[-1].start()
        due += random.exponential(1 / rate)
        time.sleep(max(0.0, due - time.monotonic()))
    for thread in threads:
        thread.join()
    return outcomes, taken


def main() -> None:
    """Run the named measurements, or all."""
    known = {each.__name__: each for each in (cpu, memory, neighbours, overload, goodput)}
    print(machine())
    for name in sys.argv[1:] or known:
        known[name]()


if __name__ == "__main__":
    main()
