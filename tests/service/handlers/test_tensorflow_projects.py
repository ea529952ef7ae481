"""Projects of the type ``tensorflow``, by ``ovms serve``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.project_processes import ProjectProcess, serving_project
from tests.support.projects import write_project
from tests.support.saved_models import write_classifier

pytestmark = pytest.mark.e2e

HANDLER = """
class Handler:
    def __init__(self, tensorflow_client, config):
        self.client = tensorflow_client
        self.names = config["names"]

    def handle_post(self, payload, query_params):
        prediction = self.client.predict(payload["inputs"], payload.get("model"), query_params.get("version"))
        return {"name": self.names[int(prediction["class_ids"][0])], "scores": prediction["scores"]}
"""
CONFIG = {"names": ["low", "high"]}


def _project(folder: Path, models: dict[str, Any], **keys: Any) -> Path:
    return write_project(folder, HANDLER, type="tensorflow", models=models, config=CONFIG, **keys)


def _ask(server: ProjectProcess, row: list[float], path: str = "/", **more: Any) -> Any:
    answer = server.ask("POST", path, json={"inputs": {"features": [row]}, **more})
    return answer.json() if answer.status_code == 200 else answer.status_code


def test_versions_of_a_saved_model(tmp_path: Path) -> None:
    """The latest one answers unless another is asked for, and `/info` describes each by its signature."""
    for version in (9, 10):
        write_classifier(tmp_path / "models" / str(version), version)
    file = _project(tmp_path / "project", {"path": str(tmp_path / "models")})
    with serving_project(file) as server:
        assert _ask(server, [1, 0, 0]) == {"name": "high", "scores": [0.0, 10.0]}
        assert _ask(server, [1, 0, 0], "/?version=9") == {"name": "high", "scores": [0.0, 9.0]}
        assert _ask(server, [-1, 0, 0]) == {"name": "low", "scores": [0.0, -10.0]}
        assert _ask(server, [1, 0, 0], "/?version=11") == 500
        info = server.ask(path="/info").json()["model_metadata"]
        assert list(info) == ["_cortex_default-10", "_cortex_default-9"]
        assert info["_cortex_default-9"]["input_signatures"] == {"features": {"shape": [-1, 3], "type": "float32"}}
        assert server.stop() == 0


def test_saved_models_that_are_cached(tmp_path: Path) -> None:
    """Each is loaded when it is asked for, with one in memory at a time."""
    for weight, name in enumerate("abc", 1):
        write_classifier(tmp_path / "models" / name / "1", weight)
    models = {"dir": str(tmp_path / "models"), "cache_size": 1, "disk_cache_size": 2}
    with serving_project(_project(tmp_path / "project", models)) as server:
        for weight, name in (*enumerate("abc", 1), (1, "a"), (3, "c")):
            assert _ask(server, [1, 0, 0], model=name)["scores"] == [0.0, weight]
        info = server.ask(path="/info").json()["model_metadata"]
        assert {name: each["versions"] for name, each in info.items()} == {"a": ["1"], "b": ["1"], "c": ["1"]}


def test_two_clients_share_one_run(tmp_path: Path) -> None:
    """Neither would be answered in time alone, as a batch waits for its second half."""
    write_classifier(tmp_path / "models" / "1")
    batching = {"max_batch_size": 2, "batch_interval_seconds": 600}
    keys = {"server_side_batching": batching, "threads_per_process": 2}
    file = _project(tmp_path / "project", {"path": str(tmp_path / "models")}, **keys)
    with serving_project(file) as server, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda value: _ask(server, [value, 0, 0]), (1, 2)))
    assert [answer["scores"] for answer in answers] == [[0.0, 1.0], [0.0, 2.0]]
