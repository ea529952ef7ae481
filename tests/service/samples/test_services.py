"""The catalogue of services: scripts in the manner of Paddle Serving, with their models and configurations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from platformdirs import user_cache_path

from ovmstrio.runtimes.ops.config.pipeline_file import read_pipeline_config
from ovmstrio.runtimes.ops.predictor.local_predict import LocalPredictor
from ovmstrio_samples.catalog import BY_NAME, SAMPLES, SERVICES
from ovmstrio_samples.ops_regression.client import FLOWERS
from ovmstrio_samples.preparing import prepare_sample
from tests.support.commands import run_command
from tests.support.paddle_files import Layer, write_model

HERE = SERVICES[0].folder.parent
NAMES = [sample.name for sample in (*SERVICES, *SAMPLES) if sample in SERVICES or getattr(sample, "service", False)]

ALL_SIZES = Layer(np.array([[-0.20727], [0.22283], [0.52408]], np.float32), np.array([-0.24031], np.float32))
PETAL_ONLY = Layer(np.array([[0], [0], [0.41576]], np.float32), np.array([-0.36308], np.float32))
MODELS = {
    "ops_regression/petal_width_model": (ALL_SIZES, "separate", 1_007_000),
    "ops_diamond/all_sizes_model": (ALL_SIZES, "params", 1_008_005),
    "ops_diamond/petal_only_model": (PETAL_ONLY, "pdmodel", 2_006_002),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_listed_service_can_be_configured(name: str) -> None:
    """Its configuration is one, its script is there, and it is in the table of all samples."""
    folder = HERE / name
    settings = read_pipeline_config(yml_file=str(folder / "config.yml"))
    assert settings.ops
    for op in settings.ops.values():
        assert (folder / (op.local_service_conf.model_config or "") / "serving_server_conf.prototxt").is_file()
    assert (folder / "web_service.py").is_file()
    assert (folder / "README.md").is_file()
    assert f"[{name}]({name}/README.md)" in (HERE / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("model", MODELS)
def test_a_model_holds_the_coefficients_of_its_readme(model: str, tmp_path: Path) -> None:
    """The files are what these coefficients are written as, in three layouts and ages."""
    layer, layout, version = MODELS[model]
    write_model(tmp_path, layer, layout=layout, version=version)  # type: ignore[arg-type]
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    folder = HERE / model
    assert {name: (folder / name).read_bytes() for name in files} == files


@pytest.mark.parametrize("model", MODELS)
def test_a_model_estimates_widths(model: str) -> None:
    """Each estimate is what the coefficients give, and less than half a centimetre off."""
    predictor = LocalPredictor()
    predictor.load_model_config(str(HERE / model))
    sizes = np.array([sizes for sizes, _ in FLOWERS], np.float32)
    width = predictor.predict({"x": sizes}, ["width"], batch=True)["width"]
    np.testing.assert_allclose(width, MODELS[model][0].of(sizes), rtol=1e-5)
    np.testing.assert_allclose(width[:, 0], [real for _, real in FLOWERS], atol=0.5)


def _cached(name: str) -> Path:
    sample, cache = BY_NAME[name], user_cache_path("ovmstrio") / "wheels"
    if sample.wheel is None or not (cache / sample.wheel.filename).is_file():
        pytest.skip(f"not in the cache: ovms prepare --sample {name}")
    return cache


def test_a_fetched_service_is_one_folder(tmp_path: Path) -> None:
    """It has all that the script needs, and the models have the names that their descriptions tell."""
    (folder,) = prepare_sample(BY_NAME["ops_ocr"], tmp_path, 1, _cached("ops_ocr"))
    assert sorted(path.name for path in folder.iterdir()) == [
        "characters.txt", "config.yml", "ocr_det", "ocr_rec", "web_service.py"
    ]  # fmt: skip
    for name, shape in (("ocr_det", (1, 1, 64, 96)), ("ocr_rec", (1, 12, 6625))):
        predictor = LocalPredictor()
        predictor.load_model_config(str(folder / name), thread_num=2)
        picture = np.zeros((1, 3, 64 if name == "ocr_det" else 48, 96), np.float32)
        assert predictor.predict({"x": picture}, batch=True)["likely"].shape == shape


def test_preparing_a_service_tells_how_to_run_it(tmp_path: Path) -> None:
    """The next commands are those of scripts."""
    _cached("ops_ocr")
    result = run_command("prepare", "--sample", "ops_ocr", "--repository", str(tmp_path / "models"))
    assert result.exit_code == 0, result.stderr
    assert f"cd {tmp_path}/models/ops_ocr && ovms run web_service.py" in result.stderr
    assert "python -m ovmstrio_samples.ops_ocr.client" in result.stderr
