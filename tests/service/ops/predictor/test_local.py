"""Models of this process, on the event loop and from any thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError, FailedPrecondition
from ovmstrio.runtimes.ops.config.op_settings import LocalServiceConf, OpSettings
from ovmstrio.runtimes.ops.predictor.local_predict import LocalPredictor
from ovmstrio.runtimes.ops.predictor.make import PredictorMaker
from ovmstrio.runtimes.ops.predictor.protocol import FeedMismatch, FeedTypeError, Predictor
from tests.support.paddle_files import layers, write_described, write_model, write_prototxt

X = np.array([[1, 2, 3], [0.5, 0, -1]])


async def make(folder: Path, worker: int = 0, **conf: Any) -> Predictor:
    """Make what a worker of an Op infers with."""
    settings = OpSettings("op", concurrency=2, local_service_conf=LocalServiceConf(str(folder), **conf))
    return await PredictorMaker(is_thread_op=True)(settings, worker)


async def test_infers_by_aliases(tmp_path: Path) -> None:
    """Feeds and outputs have their aliases, arrays are cast, and fp32 is exact."""
    first, second = layers(2)
    predictor = await make(write_described(tmp_path, first, second))

    assert (list(predictor.feed_names), list(predictor.fetch_names)) == (["feed"], ["first", "second"])
    answer = await predictor.predict({"feed": X})

    assert list(answer) == ["first", "second"]
    np.testing.assert_allclose(answer["first"], first.of(X), rtol=1e-6)
    np.testing.assert_allclose(answer["second"], second.of(X), rtol=1e-6)


@pytest.mark.parametrize(
    ("configured", "asked", "given"),
    [
        (None, None, ["first", "second"]),
        ((), None, ["first", "second"]),
        (("second",), None, ["second"]),
        (("second",), [], ["second"]),
        (("second",), ["first"], ["first"]),
        (None, ["second", "first"], ["second", "first"]),
    ],
)
async def test_fetches(
    tmp_path: Path, configured: tuple[str, ...] | None, asked: list[str] | None, given: list[str]
) -> None:
    """What is asked for goes before what is configured; no names are all."""
    predictor = await make(write_described(tmp_path, *layers(2)), fetch_list=configured)

    assert list(await predictor.predict({"feed": X}, asked)) == given


async def test_matches_outputs_by_position(tmp_path: Path) -> None:
    """Outputs that the description calls by other names are matched by their order."""
    first, second = layers(2)
    write_model(tmp_path, second, first)
    write_prototxt(tmp_path, {"image": "feed"}, {"save_infer_model/scale_0": "a", "save_infer_model/scale_1": "b"})

    answer = await (await make(tmp_path)).predict({"feed": X})

    np.testing.assert_allclose(answer["a"], second.of(X), rtol=1e-6)
    np.testing.assert_allclose(answer["b"], first.of(X), rtol=1e-6)


async def test_gives_the_declared_integers(tmp_path: Path) -> None:
    """Outputs are cast to the declared type if that is of the same kind, and left alone otherwise."""
    write_model(tmp_path, *layers(2))
    write_prototxt(tmp_path, {"x": "feed"}, {"fc_0.tmp_1": "a"}, fetch_type=3)
    assert (await (await make(tmp_path)).predict({"feed": X}))["a"].dtype == np.float64

    write_prototxt(tmp_path, {"x": "feed"}, {"fc_0.tmp_1": "a"}, fetch_type=0)
    assert (await (await make(tmp_path)).predict({"feed": X}))["a"].dtype == np.float32


async def test_adds_the_batch_axis(tmp_path: Path) -> None:
    """A sample without a batch axis is a batch of one."""
    answer = await (await make(write_described(tmp_path, *layers()))).predict({"feed": X[0]}, batch=False)

    assert answer["first"].shape == (1, 2)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "int8", "what"])
async def test_takes_every_precision(tmp_path: Path, precision: str) -> None:
    """Whatever precision is asked for, the answer is about right."""
    (layer,) = layers()
    predictor = await make(write_described(tmp_path, layer), precision=precision)

    np.testing.assert_allclose((await predictor.predict({"feed": X}))["first"], layer.of(X), rtol=0.02)


async def test_refuses_feeds(tmp_path: Path) -> None:
    """A feed that does not fit is refused by the check and by the inference, and the next one is inferred on."""
    predictor = await make(write_described(tmp_path, *layers()))
    for feed, error in (({"x": X}, FeedMismatch), ({"feed": X[:, :2]}, FeedMismatch), ({"feed": 1}, FeedTypeError)):
        with pytest.raises(error):
            predictor.check(feed)
        with pytest.raises(error):
            await predictor.predict(feed)
    with pytest.raises(FeedMismatch, match=r"unknown \['third'\]"):
        await predictor.predict({"feed": X}, ["third"])

    predictor.check({"feed": X})
    assert (await predictor.predict({"feed": X}))["first"].shape == (2, 2)


async def test_many_at_once(tmp_path: Path) -> None:
    """Concurrent inferences of all sizes each get their own answer."""
    (layer,) = layers()
    predictor = await make(write_described(tmp_path, layer))

    async def ask(number: int) -> None:
        rows = np.full((number % 7 + 1, 3), number)
        answer = await predictor.predict({"feed": rows})
        np.testing.assert_allclose(answer["first"], layer.of(rows), rtol=1e-5)

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(ask, number)


async def test_threads_share_the_model(tmp_path: Path) -> None:
    """Workers of one process and device share one model; workers of processes have their own, of other Ops, too."""
    conf = LocalServiceConf(str(write_described(tmp_path, *layers())))
    maker = PredictorMaker(is_thread_op=True)
    with capture_logs() as logs:
        made = [await maker(OpSettings(name, concurrency=2, local_service_conf=conf), 0) for name in ("a", "a", "b")]

    assert [line["op"] for line in logs if line["event"] == "model loaded"] == ["a", "b"]
    del made


@pytest.mark.parametrize(
    ("variables", "conf", "message"),
    [
        ({"is_lod_tensor": "true"}, {}, "OpenVINO has no LoD tensors, which 'feed' are said to be"),
        ({}, {"fetch_list": ("other",)}, r"op\.op\.fetch_list: .*unknown \['other'\]. The model gives \['first'\]"),
        ({}, {"device_type": 5}, "device_type"),
        ({}, {"client_type": "brpc"}, r"client_type: .*write client_type: local_predictor"),
    ],
)
async def test_refuses_at_the_start(
    tmp_path: Path, variables: dict[str, str], conf: dict[str, Any], message: str
) -> None:
    """What cannot be served ends the start, with the way out."""
    write_model(tmp_path, *layers())
    write_prototxt(tmp_path, {"x": "feed"}, {"fc_0.tmp_1": "first"}, **variables)

    with pytest.raises(ConfigError, match=message):
        await make(tmp_path, **conf)


async def test_outputs_without_row_offsets(tmp_path: Path) -> None:
    """An output that is said to be a LoD tensor comes as an array, and a warning tells of it."""
    (layer,) = layers()
    folder = write_described(tmp_path, layer)
    file = folder / "serving_server_conf.prototxt"
    feed, fetch = file.read_text().split("fetch_var")
    file.write_text(f"{feed}fetch_var{fetch.replace('is_lod_tensor: false', 'is_lod_tensor: true')}")

    with capture_logs() as logs:
        predictor = await make(folder)

    assert [line["fetch"] for line in logs if line["log_level"] == "warning"] == [["first"]]
    assert list(await predictor.predict({"feed": X})) == ["first"]


def test_local_predictor(tmp_path: Path) -> None:
    """The predictor of scripts tells names, types and shapes, and takes lists, single samples and batches."""
    first, second = layers(2)
    predictor = LocalPredictor()
    predictor.load_model_config(str(write_described(tmp_path, first, second)), thread_num=2, use_mkldnn=True)

    assert (predictor.feed_names_, predictor.fetch_names_) == (["feed"], ["first", "second"])
    assert (predictor.feed_types_, predictor.feed_shapes_) == ({"feed": 1}, {"feed": [3]})
    assert predictor.fetch_types_ == {"first": 1, "second": 1}
    np.testing.assert_allclose(predictor.predict({"feed": [1, 2, 3]})["first"], first.of(X[:1]), rtol=1e-6)
    answer = predictor.predict({"feed": X}, fetch="second", batch=True)
    assert list(answer) == ["second"]
    np.testing.assert_allclose(answer["second"], second.of(X), rtol=1e-6)
    np.testing.assert_allclose(predictor.predict({"feed": X.tolist()}, [], batch=True)["first"], first.of(X), rtol=1e-6)


def test_local_predictor_refuses(tmp_path: Path) -> None:
    """Without a model, or with a feed that does not fit, the predictor of scripts tells what is wrong."""
    predictor = LocalPredictor()
    with pytest.raises(FailedPrecondition, match="call load_model_config first"):
        predictor.predict({"feed": [1, 2, 3]})
    predictor.load_model_config(str(write_described(tmp_path, *layers())))
    with pytest.raises(FeedMismatch):
        predictor.predict({"feed": X}, batch=False)
    with pytest.raises(FeedTypeError):
        predictor.predict({"feed": ["a", "b", "c"]})


def test_local_predictor_in_threads(tmp_path: Path) -> None:
    """Any number of threads may share one; each gets its own answers."""
    (layer,) = layers()
    predictor = LocalPredictor()
    predictor.load_model_config(str(write_described(tmp_path, layer)), thread_num=2)
    wrong: list[int] = []

    def ask(number: int) -> None:
        for step in range(20):
            rows = np.full((step + 1, 3), number)
            answer = predictor.predict({"feed": rows}, batch=True)["first"]
            if not np.allclose(answer, layer.of(rows), rtol=1e-5):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
