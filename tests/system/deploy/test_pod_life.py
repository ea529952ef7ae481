"""The life of pods, played with the manifest's own command and probes: started, ready, replaced while clients call."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support import ir
from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, running
from tests.support.waits import WAIT_SECONDS, until

pytestmark = pytest.mark.slow

_MANIFEST = Path(__file__).parents[3] / "deploy" / "kubernetes" / "manifests.yaml"
_DELAY, _DRAIN = 4, 10
_LATE_SECONDS = 2
"""For so long after a pod was told to end it still gets new connections, as from proxies that have not heard of it."""
_BODY = {"inputs": [{"name": "b", "datatype": "FP32", "shape": [1, 10], "data": [1] * 10}]}


@pytest.fixture(scope="module")
def container() -> dict[str, Any]:
    documents = yaml.safe_load_all(_MANIFEST.read_text())
    (deployment,) = [each for each in documents if each and each["kind"] == "Deployment"]
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(found)


@dataclass
class _Pod:
    server: OvmsProcess
    container: dict[str, Any]

    def passes(self, probe: str) -> bool:
        return self.server.answers(self.container[probe]["httpGet"]["path"])

    def until(self, probe: str, *, passes: bool) -> None:
        def is_reached() -> bool:
            assert self.server.process.poll() is None
            return self.passes(probe) == passes

        until(is_reached, why=lambda: f"the {probe} does not become {passes}")


@contextmanager
def _pod(container: dict[str, Any], models: Path) -> Iterator[_Pod]:
    grpc, rest = free_ports(2)
    other = {
        "--config_path": str(models / "config.json"), "--port": str(grpc), "--rest_port": str(rest),
        "--drain_delay": str(_DELAY), "--drain_seconds": str(_DRAIN),
    }  # fmt: skip
    arguments = []
    for text in container["args"]:
        name, separator, value = text.partition("=")
        arguments.append(f"{name}{separator}{other.get(name, value)}")
    bound = ["--grpc_bind_address=127.0.0.1", "--rest_bind_address=127.0.0.1", "--trial_load=off"]
    with running(*arguments, *bound, grpc=grpc, rest=rest, ready=False) as server:
        yield _Pod(server, container)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pod")
    ir.save(ir.dummy(), folder, "iris")
    config = f'{{"model_config_list": [{{"config": {{"name": "iris", "base_path": "{folder}/iris"}}}}]}}'
    (folder / "config.json").write_text(config)
    return folder


class _Endpoints:
    def __init__(self) -> None:
        self.pods: list[_Pod] = []
        self.outcomes: Counter[str] = Counter()
        self.is_over = threading.Event()

    def call_on(self, *, keeps: bool) -> None:
        while not self.is_over.is_set():
            base = random.choice(self.pods).server.rest
            with httpx.Client(base_url=base, timeout=WAIT_SECONDS) as client:
                for _ in range(50 if keeps else 1):
                    answer = client.post("/v2/models/iris/infer", json=_BODY)
                    self.outcomes[str(answer.status_code)] += 1
                    if answer.headers.get("connection") == "close" or self.is_over.is_set():
                        break


def test_probes_of_a_pod_pass_in_order(container: dict[str, Any], models: Path) -> None:
    with _pod(container, models) as pod:
        pod.until("startupProbe", passes=True)
        assert pod.passes("livenessProbe")
        pod.until("readinessProbe", passes=True)
        pod.server.process.terminate()
        pod.until("readinessProbe", passes=False)
        assert pod.passes("livenessProbe")
        answer = httpx.post(f"{pod.server.rest}/v2/models/iris/infer", json=_BODY, timeout=WAIT_SECONDS)
        assert answer.json()["outputs"][0]["data"] == [2.0] * 10
        assert pod.server.process.wait(_DELAY + _DRAIN + WAIT_SECONDS) == 0


def test_no_request_is_lost_while_all_pods_are_replaced(container: dict[str, Any], models: Path) -> None:
    endpoints = _Endpoints()
    with ExitStack() as stack:
        old = [stack.enter_context(_pod(container, models)) for _ in range(2)]
        for pod in old:
            pod.until("readinessProbe", passes=True)
        endpoints.pods = list(old)
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(endpoints.call_on, keeps=keeps) for keeps in (True, False)]
            try:
                for pod in old:
                    _replace(pod, stack.enter_context(_pod(container, models)), endpoints)
            finally:
                endpoints.is_over.set()
            for call in calls:
                call.result(60)
    assert endpoints.outcomes.keys() == {"200"}, endpoints.outcomes
    assert endpoints.outcomes["200"] > 100


def _replace(old: _Pod, new: _Pod, endpoints: _Endpoints) -> None:
    new.until("readinessProbe", passes=True)
    endpoints.pods = [*endpoints.pods, new]
    old.server.process.terminate()
    threading.Event().wait(_LATE_SECONDS)
    endpoints.pods = [pod for pod in endpoints.pods if pod is not old]
    output, _ = old.server.process.communicate(timeout=_DELAY + _DRAIN + WAIT_SECONDS)
    assert old.server.process.returncode == 0, output
    assert "requests cut" not in output
