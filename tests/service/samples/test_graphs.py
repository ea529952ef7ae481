"""The samples that are graphs, served in this process and asked by their own clients."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from platformdirs import user_cache_path
from tritonclient.utils import InferenceServerException

from ovmstrio_samples.catalog import BY_NAME, SAMPLES
from ovmstrio_samples.counter_stream.client import words
from ovmstrio_samples.error_output.client import MATRICES, inverses
from ovmstrio_samples.image_pipeline.client import COFFEE, classify
from ovmstrio_samples.incrementer.client import count_on
from ovmstrio_samples.labels_image.client import nearest, plain
from ovmstrio_samples.preparing import prepare_sample
from ovmstrio_samples.text_generation.client import completions
from ovmstrio_samples.triton import Stream, as_text
from tests.support.commands import run_command
from tests.support.served_in_thread import ServedInThread, serving_in_thread

_GRAPHS = [sample.name for sample in SAMPLES if sample.graph]
_EMBEDDED = [sample.name for sample in SAMPLES if sample.graph and sample.wheel is None]


def _prepare(name: str, tmp_path: Path) -> dict[str, Any]:
    """Prepare a sample from the user's cache, or skip; return the settings that serve it."""
    sample, cache = BY_NAME[name], user_cache_path("ovmstrio") / "wheels"
    if sample.wheel is None or not (cache / sample.wheel.filename).is_file():
        pytest.skip(f"not in the cache: ovms prepare --sample {name}")
    (folder,) = prepare_sample(sample, tmp_path, 1, cache)
    isolation = {"python_isolation": "process"} if sample.isolated else {}
    return {"model_name": name, "model_path": folder, **isolation}


@pytest.mark.parametrize("name", _GRAPHS)
def test_the_graph_file_is_found_good(name: str) -> None:
    """``ovms graph check`` has nothing to say against the graph files of the samples."""
    folder = Path(__file__).parents[3] / "samples" / "ovmstrio_samples" / name
    result = run_command("graph", "check", str(folder / "graph.pbtxt"))
    assert result.exit_code == 0, result.output


def test_the_embedded_graphs_are_in_the_configuration(embedded: Path) -> None:
    """Each lies in a folder of its name, with its graph file and handler."""
    entries = json.loads(embedded.read_text())["mediapipe_config_list"]
    assert [entry["name"] for entry in entries] == _EMBEDDED
    for entry in entries:
        folder = embedded.parent / entry["base_path"]
        assert (folder / "graph.pbtxt").is_file()
        assert len(list(folder.glob("*.py"))) == 1


def test_three_nodes_add_three(server: ServedInThread) -> None:
    """Numbers of several types and shapes come back three larger."""
    np.testing.assert_array_equal(count_on(server.grpc, np.array([1, 2, 39], np.int64)), [4, 5, 42])
    halves = count_on(server.grpc, np.array([[0.5], [1.5]], np.float32))
    assert halves.dtype == np.float32
    np.testing.assert_array_equal(halves, [[3.5], [4.5]])


def test_words_arrive_one_by_one(server: ServedInThread) -> None:
    """Every word is a response, and their number is the last."""
    assert list(words(server.grpc, "a word at a time")) == ["a", "word", "at", "a", "time", 5]
    assert list(words(server.grpc, "")) == [0]


def test_the_timestamps_of_a_generation_ascend_by_one(server: ServedInThread) -> None:
    """The first set of outputs has the request's timestamp, each further one the next."""
    with Stream(server.grpc, "counter_stream") as stream:
        stream.send({"text": "one two three"}, OVMS_MP_TIMESTAMP=100)
        assert [(reply := stream.receive()).name + f" {reply.timestamp}" for _ in range(4)] == [
            "word 100",
            "word 101",
            "word 102",
            "count 103",
        ]


def test_an_error_of_one_request_is_an_answer(server: ServedInThread) -> None:
    """The matrix without an inverse gets a message, and the stream goes on."""
    first, second, third = inverses(server.grpc, MATRICES)
    np.testing.assert_allclose(np.asarray(first), [[0.5, 0], [0, 0.25]])
    assert second == "Singular matrix"
    np.testing.assert_allclose(np.asarray(third), [[0, 1], [1, 0]])


def test_an_exception_of_a_handler_ends_the_stream(server: ServedInThread) -> None:
    """What execute lets out reaches the client with the node's name, and at once."""
    with Stream(server.grpc, "error_output") as stream:
        stream.send({"input": np.eye(2, dtype=np.float16)})
        with pytest.raises(
            InferenceServerException, match=r'node "python_node" failed: .*: TypeError: .*inverse\.py:[0-9]+'
        ):
            stream.receive()


def test_labels_are_kept_for_the_pictures_that_follow(server: ServedInThread) -> None:
    """Labels alone have no answer; each picture after them has one."""
    pictures = [plain(0, 0, 90), plain(220, 30, 40), plain(240, 220, 20)]
    assert list(nearest(server.grpc, "gold,navy,crimson", pictures)) == ["navy", "crimson", "gold"]


def test_streams_do_not_see_each_others_labels(server: ServedInThread) -> None:
    """Two streams open at the same time answer with their own labels."""
    with Stream(server.grpc, "labels_image") as one, Stream(server.grpc, "labels_image") as other:
        one.send({"labels": "gold,navy"})
        other.send({"labels": "red,white"})
        for stream, expected in ((one, "gold"), (other, "white"), (one, "gold")):
            stream.send({"image": plain(250, 220, 60)})
            assert as_text(stream.receive().value) == expected


@pytest.mark.slow
def test_a_photograph_gets_its_name(tmp_path: Path) -> None:
    """A cup of espresso is recognised by the model inside the graph, and a broken file is refused."""
    with serving_in_thread(**_prepare("image_pipeline", tmp_path)) as process:
        label, score = classify(process.grpc, COFFEE)
        assert label == "espresso"
        assert 0.5 < score <= 1
        broken = tmp_path / "broken.jpg"
        broken.write_bytes(b"no picture")
        with pytest.raises(InferenceServerException, match='node "preprocess" failed'):
            classify(process.grpc, broken)


@pytest.mark.slow
def test_a_language_model_streams_its_answer(tmp_path: Path) -> None:
    """The answer comes in pieces and ends with the signal; parameters bound it; leaving early harms nobody."""
    pytest.importorskip("openvino_genai")
    with serving_in_thread(**_prepare("text_generation", tmp_path)) as process:
        pieces = list(completions(process.grpc, "What is the capital of France?"))
        assert len(pieces) > 3
        assert "Paris" in "".join(pieces)
        assert len(list(completions(process.grpc, "Tell me a story.", max_new_tokens=5))) <= 5
        first = list(itertools.islice(completions(process.grpc, "Tell me a long story.", max_new_tokens=1024), 3))
        assert len(first) == 3
        assert "Paris" in "".join(completions(process.grpc, "What is the capital of France?"))
        with pytest.raises(InferenceServerException, match="max_new_tokens: expected a number from 1 to 1024"):
            list(completions(process.grpc, "Hello", max_new_tokens=0))
