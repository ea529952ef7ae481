"""The samples that are pipelines, served in this process and asked by their own clients and by Triton's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from platformdirs import user_cache_path

import ovmstrio_samples
from ovmstrio.client.connect import open_client
from ovmstrio_samples.catalog import BY_NAME, SAMPLES
from ovmstrio_samples.custom_node_c import client as custom_node_c
from ovmstrio_samples.ensemble import client as ensemble
from ovmstrio_samples.entries import write_config
from ovmstrio_samples.iris.flowers import FLOWERS
from ovmstrio_samples.preparing import prepare_sample
from ovmstrio_samples.question import Question
from tests.support.commands import run_command
from tests.support.served_in_thread import ServedInThread, serving_in_thread

_PIPELINES = [sample.name for sample in SAMPLES if sample.pipeline]


def _prepare(name: str, folder: Path) -> Path:
    """Prepare a sample, from the user's cache where it is fetched, or skip; gives the config.json that serves it."""
    sample, cache = BY_NAME[name], user_cache_path("ovmstrio") / "wheels"
    if sample.wheel is not None and not (cache / sample.wheel.filename).is_file():
        pytest.skip(f"not in the cache: ovms prepare --sample {name}")
    prepare_sample(sample, folder, 1, cache)
    write_config([sample], folder / "config.json")
    return folder / "config.json"


@pytest.fixture(scope="module")
def c_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare the sample in C, where there is a compiler."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: install gcc")
    return _prepare("custom_node_c", tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="module")
def c_server(c_config: Path) -> Iterator[ServedInThread]:
    """Serve the sample in C."""
    with serving_in_thread(config_path=c_config) as process:
        yield process


def _check(server: ServedInThread, questions: list[Question]) -> None:
    for rest in (False, True):
        with open_client(server.http if rest else server.grpc, rest=rest) as client:
            answers = [question.read(client.infer(question.model, question.inputs)) for question in questions]
        assert answers == [question.expected for question in questions]


@pytest.mark.parametrize("name", _PIPELINES)
def test_the_configuration_of_a_pipeline_names_what_is_prepared(name: str) -> None:
    """Its models are the sample's entries with versions, and its libraries lie in the folder of its name."""
    sample = BY_NAME[name]
    config: Any = sample.config()
    models = [entry["config"]["base_path"] for entry in config["model_config_list"]]
    assert models == [entry for entry in sample.entries if sample.has_versions(entry)]
    assert name in sample.entries
    assert not sample.has_versions(name)
    for library in config["custom_node_library_config_list"]:
        assert Path(library["base_path"]).parent == Path(name)
        assert library["name"].startswith(f"{name}_")
    assert [pipeline["name"] for pipeline in config["pipeline_config_list"]] == [name]


def test_the_embedded_samples_hold_the_pipelines_that_need_no_compiler(embedded: Path) -> None:
    """The ensemble is there with its models and its node; what has to be compiled is not."""
    config = json.loads(embedded.read_text())
    assert [pipeline["name"] for pipeline in config["pipeline_config_list"]] == ["ensemble"]
    for library in config["custom_node_library_config_list"]:
        assert (embedded.parent / library["base_path"]).is_file()
    result = run_command("pipeline", "check", str(embedded))
    assert result.exit_code == 0, result.output


def test_two_classifiers_vote(server: ServedInThread) -> None:
    """Four flowers get their species, over both protocols, with a note where the classifiers disagree."""
    _check(server, ensemble.questions())


@pytest.mark.parametrize("protocol", [tritonclient.grpc, tritonclient.http], ids=["grpc", "http"])
def test_a_batch_of_flowers_is_voted_on_row_by_row(server: ServedInThread, protocol: Any) -> None:
    """Triton's clients get strings, weighed probabilities, and where the two agreed."""
    grpc = protocol is tritonclient.grpc
    flowers = np.array([*(sizes for sizes, _ in FLOWERS), ensemble.DOUBTFUL], np.float32)
    tensor = protocol.InferInput("features", list(flowers.shape), "FP32")
    tensor.set_data_from_numpy(flowers)
    url = server.grpc if grpc else server.http
    with protocol.InferenceServerClient(url) as client:
        alone = [
            client.infer(name, [tensor]).as_numpy("probabilities") for name in ("ensemble_regression", "ensemble_bayes")
        ]
        result = client.infer("ensemble", [tensor])
    assert result.as_numpy("species").tolist() == [b"setosa", b"versicolor", b"virginica", b"virginica"]
    np.testing.assert_allclose(result.as_numpy("probabilities"), 0.75 * alone[0] + 0.25 * alone[1], atol=1e-6)
    assert result.as_numpy("agreed").tolist() == [True, True, True, False]


def test_nodes_in_c_split_and_gather(c_server: ServedInThread) -> None:
    """Three variants go through the model, and the best of them comes back with its number."""
    _check(c_server, custom_node_c.questions())


@pytest.mark.parametrize("protocol", [tritonclient.grpc, tritonclient.http], ids=["grpc", "http"])
def test_the_best_variant_is_chosen(c_server: ServedInThread, protocol: Any) -> None:
    """Numbers whose sum is negative are best when negated."""
    given = np.random.default_rng(0).normal(-1, 3, (1, 10)).astype(np.float32)
    variants = np.stack([given * np.float32(factor) + 1 for factor in (1, -1, 0.5)])
    best = variants.sum(axis=(1, 2)).argmax()
    tensor = protocol.InferInput("numbers", [1, 10], "FP32")
    tensor.set_data_from_numpy(given)
    url = c_server.grpc if protocol is tritonclient.grpc else c_server.http
    with protocol.InferenceServerClient(url) as client:
        result = client.infer("custom_node_c", [tensor])
    np.testing.assert_allclose(result.as_numpy("best"), variants[best], rtol=1e-6)
    assert result.as_numpy("which").tolist() == [best]


@pytest.mark.parametrize(
    ("library", "param"), [("spread", "factors=1 two 3"), ("spread", "factors="), ("choose", "criterion=nicest")]
)
def test_a_library_in_c_refuses_parameters_that_it_cannot_use(c_config: Path, library: str, param: str) -> None:
    """The check finds what would keep the pipeline from loading."""
    file = c_config.parent / "custom_node_c" / f"libcustom_node_{library}.so"
    result = run_command("custom-node", "check", str(file), "--param", param)
    assert result.exit_code == 1


def test_without_a_compiler_the_sample_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with 1 and names the package; nothing is left behind."""
    monkeypatch.setenv("CC", "no-such-compiler")
    result = run_command("prepare", "--sample", "custom_node_c", "--repository", str(tmp_path / "models"))
    assert result.exit_code == 1
    assert "spread.c is a custom node in C that has to be compiled" in result.stderr
    assert "install gcc" in result.stderr
    assert not (tmp_path / "models" / "custom_node_c").exists()


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], list[str]]]:
    """Serve the pipeline that reads pictures, and give what asks it."""
    pytest.importorskip("cv2")
    from ovmstrio_samples.ocr_pipeline.client import read_text

    config = _prepare("ocr_pipeline", tmp_path_factory.mktemp("ocr"))
    with (
        serving_in_thread(config_path=config) as server,
        tritonclient.grpc.InferenceServerClient(server.grpc) as client,
    ):
        yield lambda path: read_text(client, path)


@pytest.mark.slow
def test_a_photographed_page_is_read(read: Callable[[Path], list[str]]) -> None:
    """The words of the page come back line by line, from top to bottom."""
    from ovmstrio_samples.ocr_pipeline.client import PAGE, WORDS

    lines = read(PAGE)
    assert tuple(lines[: len(WORDS)]) == WORDS
    assert lines[len(WORDS)].startswith("markers = np.zeros")


@pytest.mark.slow
def test_a_picture_without_text_has_no_lines(read: Callable[[Path], list[str]]) -> None:
    """A cup of coffee says nothing."""
    assert read(Path(ovmstrio_samples.__file__).parent / "image_pipeline" / "coffee.jpg") == []


@pytest.mark.slow
def test_what_is_no_picture_is_refused(read: Callable[[Path], list[str]], tmp_path: Path) -> None:
    """The message has the node and what it says."""
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    with pytest.raises(tritonclient.grpc.InferenceServerException, match=r"decode.*no picture that OpenCV can read"):
        read(broken)
