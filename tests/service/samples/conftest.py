from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from ovmstrio_samples import prepare_repository
from ovmstrio_samples.question import Arrays, Ask
from tests.support.served_in_thread import ServedInThread, serving_in_thread


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_repository(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def server(embedded: Path) -> Iterator[ServedInThread]:
    with serving_in_thread(config_path=embedded) as running:
        yield running


def _ask_folder(repository: Path) -> Ask:
    core = ov.Core()
    compiled: dict[str, ov.CompiledModel] = {}

    def ask(model: str, inputs: Arrays) -> Arrays:
        if model not in compiled:
            folder = repository / model / "1"
            file = next((path for path in folder.iterdir() if path.suffix in {".xml", ".onnx", ".tflite"}), folder)
            compiled[model] = core.compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        answers = compiled[model](dict(inputs), share_inputs=True)
        return {max(port.get_names()): np.array(value) for port, value in answers.items()}

    return ask


@pytest.fixture
def ask_folder() -> Callable[[Path], Ask]:
    return _ask_folder
