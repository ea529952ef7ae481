"""The samples of handlers, served as their READMEs say, and asked by their own clients."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ovmstrio_samples
from ovmstrio_samples.handler_batching import client as batching
from ovmstrio_samples.handler_iris import client as iris
from ovmstrio_samples.iris.client import FLOWERS
from tests.support.project_processes import serving_project

pytestmark = pytest.mark.e2e

SAMPLES = Path(ovmstrio_samples.__file__).parent


def _copy(name: str, folder: Path) -> Path:
    copied: Path = shutil.copytree(SAMPLES / name, folder / "samples" / name)
    return copied


def test_iris_in_versions(tmp_path: Path) -> None:
    """Both versions name the flowers, and `/info` lists them; an unknown one fails the request."""
    with serving_project(_copy("handler_iris", tmp_path)) as server:
        for sizes, species in FLOWERS:
            for version in ("latest", "1", "2"):
                assert iris.classify(f"http://{server.address}", sizes, version) == species
        (told,) = server.ask(path="/info").json()["model_metadata"].values()
        assert told["versions"] == ["2", "1"]
        wrong = server.ask("POST", json={"sepal_length": 1})
        assert (wrong.status_code, "sepal_width" in wrong.text) == (400, True)
        assert server.ask("POST", "/?version=9", json=dict.fromkeys(iris.FEATURES, 1)).status_code == 500


def test_batches(tmp_path: Path) -> None:
    """Every client gets its own answer, though they share batches; a wrong request spoils no other."""
    flowers = [FLOWERS[number % 3] for number in range(48)]
    with serving_project(_copy("handler_batching", tmp_path)) as server, ThreadPoolExecutor(49) as pool:
        wrong = pool.submit(server.ask, "POST", json="no flower")
        answers = list(pool.map(lambda flower: batching.classify(f"http://{server.address}", flower[0]), flowers))
        assert wrong.result().status_code == 500
    assert [answer["species"] for answer in answers] == [species for _, species in flowers]
    assert max(answer["batch_size"] for answer in answers) > 1
