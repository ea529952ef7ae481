"""The samples of handlers, served as their READMEs say, and asked by their own clients."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import grpc
import pytest

import ovmstrio_samples
from ovmstrio_samples.handler_batching import client as batching
from ovmstrio_samples.handler_caching import client as caching
from ovmstrio_samples.handler_iris import client as iris
from ovmstrio_samples.handler_primes import client as primes
from ovmstrio_samples.handler_sklearn import client as sklearn
from ovmstrio_samples.handler_sklearn.train import train
from ovmstrio_samples.iris.flowers import FLOWERS
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


def test_models_come_and_go_by_their_use(tmp_path: Path) -> None:
    """The least recently used one makes room, and comes back when it is asked for."""
    with serving_project(_copy("handler_caching", tmp_path)) as server:
        url = f"http://{server.address}"
        for language, text, mood in caching.TEXTS:
            assert caching.mood(url, language, text) == mood
        assert caching.loads(url) == ["en", "de", "fr", "de", "es"]
        assert set(server.ask(path="/info").json()["model_metadata"]) == {"de", "en", "es", "fr"}
        wrong = server.ask("POST", json={"language": "xx", "text": ""})
        assert (wrong.status_code, "de, en, es, fr" in wrong.text) == (404, True)


def test_primes_are_streamed(tmp_path: Path) -> None:
    """For as long as the client wants; a number that is too large is refused with a status of the handler's choice."""
    project = _copy("handler_primes", tmp_path)
    with serving_project(project, options=("--grpc_bind_address", "127.0.0.1")) as server:
        assert list(primes.primes(server.address, count=5)) == [2, 3, 5, 7, 11]
        endless = primes.primes(server.address, 1000)
        assert list(islice(endless, 3)) == [1009, 1013, 1019]
        endless.close()  # type: ignore[attr-defined]
        assert [primes.check(server.address, number) for number in (91, 97)] == [7, 97]
        with pytest.raises(grpc.RpcError) as refused:
            primes.check(server.address, 1)
        assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
        # What has no end must not keep the server.
        assert server.stop() == 0


def test_classifiers_of_scikit_learn(tmp_path: Path) -> None:
    """Two kinds of classifier are two versions of one model."""
    pytest.importorskip("sklearn")
    project = _copy("handler_sklearn", tmp_path)
    for version, kind in ((9, "regression"), (10, "neighbours")):
        train(project / "models", version, kind)
    with serving_project(project) as server:
        url = f"http://{server.address}"
        for sizes, species in FLOWERS:
            assert sklearn.classify(url, sizes, "9") == (species, "LogisticRegression")
            assert sklearn.classify(url, sizes) == (species, "KNeighborsClassifier")
