from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

import ovmstrio.samples
from ovmstrio.client.factory import open_client
from ovmstrio.samples.catalog import BY_NAME, SAMPLES
from ovmstrio.samples.counter_stream.client import words
from ovmstrio.samples.custom_node_c import client as custom_node_c
from ovmstrio.samples.ensemble import client as ensemble
from ovmstrio.samples.entries import write_config
from ovmstrio.samples.error_output.client import MATRICES, inverses
from ovmstrio.samples.image_pipeline.client import COFFEE, classify
from ovmstrio.samples.iris.flowers import FLOWERS
from ovmstrio.samples.labels_image.client import nearest, plain
from ovmstrio.samples.text_generation.client import completions
from ovmstrio.samples.triton import Stream, as_text
from tests.support.commands import run_command
from tests.support.fetched_samples import prepare_cached
from tests.support.served_in_thread import ServedInThread, serving_in_thread

_GRAPHS = [sample.name for sample in SAMPLES if sample.graph]


def _settings(name: str, tmp_path: Path) -> dict[str, Any]:
    (folder,) = prepare_cached(name, tmp_path)
    isolation = {"python_isolation": "process"} if BY_NAME[name].isolated else {}
    return {"model_name": name, "model_path": folder, **isolation}


@pytest.mark.parametrize("name", _GRAPHS)
def test_graph_files_of_samples_have_no_problems(name: str) -> None:
    folder = Path(ovmstrio.samples.__file__).parent / name
    result = run_command("graph", "check", str(folder / "graph.pbtxt"))
    assert result.exit_code == 0, result.output


def test_words_are_streamed_and_counted_with_ascending_timestamps(server: ServedInThread) -> None:
    assert list(words(server.grpc, "a word at a time")) == ["a", "word", "at", "a", "time", 5]
    assert list(words(server.grpc, "")) == [0]
    with Stream(server.grpc, "counter_stream") as stream:
        stream.send({"text": "one two three"}, OVMS_MP_TIMESTAMP=100)
        assert [(reply := stream.receive()).name + f" {reply.timestamp}" for _ in range(4)] == [
            "word 100",
            "word 101",
            "word 102",
            "count 103",
        ]


def test_errors_of_requests_keep_the_stream_open_and_exceptions_end_it(server: ServedInThread) -> None:
    first, second, third = inverses(server.grpc, MATRICES)
    np.testing.assert_allclose(np.asarray(first), [[0.5, 0], [0, 0.25]])
    assert second == "Singular matrix"
    np.testing.assert_allclose(np.asarray(third), [[0, 1], [1, 0]])
    with Stream(server.grpc, "error_output") as stream:
        stream.send({"input": np.eye(2, dtype=np.float16)})
        with pytest.raises(
            InferenceServerException, match=r'node "python_node" failed: .*: TypeError: .*inverse\.py:[0-9]+'
        ):
            stream.receive()


def test_labels_apply_to_the_pictures_that_follow_in_their_stream(server: ServedInThread) -> None:
    pictures = [plain(0, 0, 90), plain(220, 30, 40), plain(240, 220, 20)]
    assert list(nearest(server.grpc, "gold,navy,crimson", pictures)) == ["navy", "crimson", "gold"]
    with Stream(server.grpc, "labels_image") as one, Stream(server.grpc, "labels_image") as other:
        one.send({"labels": "gold,navy"})
        other.send({"labels": "red,white"})
        for stream, expected in ((one, "gold"), (other, "white"), (one, "gold")):
            stream.send({"image": plain(250, 220, 60)})
            assert as_text(stream.receive().value) == expected


@pytest.mark.slow
def test_a_photograph_is_classified(tmp_path: Path) -> None:
    with serving_in_thread(**_settings("image_pipeline", tmp_path)) as process:
        label, score = classify(process.grpc, COFFEE)
        assert label == "espresso"
        assert 0.5 < score <= 1
        broken = tmp_path / "broken.jpg"
        broken.write_bytes(b"no picture")
        with pytest.raises(InferenceServerException, match='node "preprocess" failed'):
            classify(process.grpc, broken)


@pytest.mark.slow
def test_a_language_model_streams_its_answer(tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai")
    with serving_in_thread(**_settings("text_generation", tmp_path)) as process:
        pieces = list(completions(process.grpc, "What is the capital of France?"))
        assert len(pieces) > 3
        assert "Paris" in "".join(pieces)
        assert len(list(completions(process.grpc, "Tell me a story.", max_new_tokens=5))) <= 5
        first = list(itertools.islice(completions(process.grpc, "Tell me a long story.", max_new_tokens=1024), 3))
        assert len(first) == 3
        assert "Paris" in "".join(completions(process.grpc, "What is the capital of France?"))
        with pytest.raises(InferenceServerException, match="max_new_tokens: expected a number from 1 to 1024"):
            list(completions(process.grpc, "Hello", max_new_tokens=0))


_PIPELINES = [sample.name for sample in SAMPLES if sample.pipeline]


def _config_of(name: str, folder: Path) -> Path:
    prepare_cached(name, folder)
    write_config([BY_NAME[name]], folder / "config.json")
    return folder / "config.json"


@pytest.fixture(scope="module")
def c_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: install gcc")
    return _config_of("custom_node_c", tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="module")
def c_server(c_config: Path) -> Iterator[ServedInThread]:
    with serving_in_thread(config_path=c_config) as process:
        yield process


@pytest.mark.parametrize("protocol", [tritonclient.grpc, tritonclient.http], ids=["grpc", "http"])
def test_an_ensemble_votes_on_each_row(server: ServedInThread, protocol: Any) -> None:
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


@pytest.mark.parametrize("rest", [False, True], ids=["grpc", "rest"])
def test_nodes_in_c_answer_the_questions_of_the_sample(c_server: ServedInThread, rest: bool) -> None:
    with open_client(c_server.http if rest else c_server.grpc, rest=rest) as client:
        for question in custom_node_c.questions():
            assert question.read(client.infer(question.model, question.inputs)) == question.expected


@pytest.mark.parametrize(
    ("library", "param"), [("spread", "factors=1 two 3"), ("spread", "factors="), ("choose", "criterion=nicest")]
)
def test_nodes_in_c_refuse_invalid_parameters(c_config: Path, library: str, param: str) -> None:
    file = c_config.parent / "custom_node_c" / f"libcustom_node_{library}.so"
    result = run_command("custom-node", "check", str(file), "--param", param)
    assert result.exit_code == 1


def test_a_missing_compiler_is_reported_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    result = run_command("prepare", "--sample", "custom_node_c", "--repository", str(tmp_path / "models"))
    assert result.exit_code == 1
    assert "spread.c is a custom node in C that has to be compiled" in result.stderr
    assert "install gcc" in result.stderr
    assert not (tmp_path / "models" / "custom_node_c").exists()


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], list[str]]]:
    pytest.importorskip("cv2")
    from ovmstrio.samples.ocr_pipeline.client import read_text

    config = _config_of("ocr_pipeline", tmp_path_factory.mktemp("ocr"))
    with (
        serving_in_thread(config_path=config) as server,
        tritonclient.grpc.InferenceServerClient(server.grpc) as client,
    ):
        yield lambda path: read_text(client, path)


@pytest.mark.slow
def test_a_photographed_page_is_read(read: Callable[[Path], list[str]]) -> None:
    from ovmstrio.samples.ocr_pipeline.client import PAGE, WORDS

    lines = read(PAGE)
    assert tuple(lines[: len(WORDS)]) == WORDS
    assert lines[len(WORDS)].startswith("markers = np.zeros")


@pytest.mark.slow
def test_a_picture_without_text_has_no_lines(read: Callable[[Path], list[str]]) -> None:
    assert read(Path(ovmstrio.samples.__file__).parent / "image_pipeline" / "coffee.jpg") == []


@pytest.mark.slow
def test_a_file_that_is_no_picture_is_refused(read: Callable[[Path], list[str]], tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    with pytest.raises(tritonclient.grpc.InferenceServerException, match=r"decode.*no picture that OpenCV can read"):
        read(broken)
