"""A project of the type ``tensorflow``: versions of a saved model, called over HTTP."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ovmstrio.observability.logs import configure_logs
from tests.support.projects import write_project
from tests.support.saved_models import write_classifier
from tests.support.served_in_thread import ServedInThread, serving_in_thread

if TYPE_CHECKING:
    from pathlib import Path

HANDLER = """
class Handler:
    def __init__(self, tensorflow_client, config):
        self.client = tensorflow_client
        self.names = config["names"]

    def handle_post(self, payload, query_params):
        prediction = self.client.predict(payload["inputs"], payload.get("model"), query_params.get("version"))
        return {"name": self.names[int(prediction["class_ids"][0])], "scores": prediction["scores"]}
"""


def _classify(server: ServedInThread, row: list[float], query: str = "") -> Any:
    answer = server.ask("POST", f"/classifier{query}", json={"inputs": {"features": [row]}})
    return answer.json() if answer.status_code == 200 else answer.status_code


def test_versions_of_a_saved_model(tmp_path: Path) -> None:
    """The latest version answers unless the caller names another one; an unknown version fails."""
    for version in (9, 10):
        write_classifier(tmp_path / "models" / str(version), version)
    models = {"path": str(tmp_path / "models")}
    write_project(tmp_path / "project", HANDLER, type="tensorflow", models=models, config={"names": ["low", "high"]})
    config = tmp_path / "config.json"
    handler = {"name": "classifier", "path": "project"}
    config.write_text(json.dumps({"model_config_list": [], "handler_config_list": [handler]}))
    configure_logs()
    with serving_in_thread(config_path=config) as server:
        assert _classify(server, [1, 0, 0]) == {"name": "high", "scores": [0.0, 10.0]}
        assert _classify(server, [1, 0, 0], "?version=9") == {"name": "high", "scores": [0.0, 9.0]}
        assert _classify(server, [-1, 0, 0]) == {"name": "low", "scores": [0.0, -10.0]}
        assert _classify(server, [1, 0, 0], "?version=11") == 500
