from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ovmstrio.samples
from ovmstrio.samples.handler_batching import client as batching
from ovmstrio.samples.handler_caching import client as caching
from ovmstrio.samples.handler_iris import client as iris
from ovmstrio.samples.handler_sklearn import client as sklearn
from ovmstrio.samples.handler_sklearn.train import train
from ovmstrio.samples.iris.flowers import FLOWERS
from ovmstrio.telemetry.logs import configure_logs
from tests.support.served_in_thread import serving_project_in_thread

SAMPLES = Path(ovmstrio.samples.__file__).parent


@pytest.fixture(autouse=True)
def _plain_logs() -> None:
    # The default tracebacks of structlog take long.
    configure_logs()


def _copy(name: str, folder: Path) -> Path:
    copied: Path = shutil.copytree(SAMPLES / name, folder / "samples" / name)
    return copied


def test_the_iris_sample_has_versions(tmp_path: Path) -> None:
    with serving_project_in_thread(_copy("handler_iris", tmp_path)) as server:
        for sizes, species in FLOWERS:
            for version in ("latest", "1", "2"):
                assert iris.classify(f"http://{server.http}", sizes, version) == species
        (model,) = server.ask("GET", "/info").json()["model_metadata"].values()
        assert model["versions"] == ["2", "1"]
        wrong = server.ask("POST", "/", json={"sepal_length": 1})
        assert (wrong.status_code, "sepal_width" in wrong.text) == (400, True)
        assert server.ask("POST", "/?version=9", json=dict.fromkeys(iris.FEATURES, 1)).status_code == 500


def test_the_batching_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flowers = [FLOWERS[number % 3] for number in range(48)]
    project = _copy("handler_batching", tmp_path)
    # The handler opens a file of its folder, which is the working one of a project.
    monkeypatch.chdir(project)
    with serving_project_in_thread(project) as server, ThreadPoolExecutor(49) as pool:
        wrong = pool.submit(server.ask, "POST", "/", json="no flower")
        answers = list(pool.map(lambda flower: batching.classify(f"http://{server.http}", flower[0]), flowers))
        assert wrong.result().status_code == 500
    assert [answer["species"] for answer in answers] == [species for _, species in flowers]
    assert max(answer["batch_size"] for answer in answers) > 1


def test_the_caching_sample_evicts_models(tmp_path: Path) -> None:
    with serving_project_in_thread(_copy("handler_caching", tmp_path)) as server:
        url = f"http://{server.http}"
        for language, text, mood in caching.TEXTS:
            assert caching.mood(url, language, text) == mood
        assert caching.loads(url) == ["en", "de", "fr", "de", "es"]
        assert set(server.ask("GET", "/info").json()["model_metadata"]) == {"de", "en", "es", "fr"}
        wrong = server.ask("POST", "/", json={"language": "xx", "text": ""})
        assert (wrong.status_code, "de, en, es, fr" in wrong.text) == (404, True)


def test_the_scikit_learn_sample(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    project = _copy("handler_sklearn", tmp_path)
    for version, kind in ((9, "regression"), (10, "neighbours")):
        train(project / "models", version, kind)
    with serving_project_in_thread(project) as server:
        url = f"http://{server.http}"
        for sizes, species in FLOWERS:
            assert sklearn.classify(url, sizes, "9") == (species, "LogisticRegression")
            assert sklearn.classify(url, sizes) == (species, "KNeighborsClassifier")
