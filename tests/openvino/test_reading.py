"""Files of models that OpenVINO reads in one way and not in another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.openvino.compile import ModelFile, compile_model
from ovmstrio.openvino.network import Network
from ovmstrio.openvino.reading import read_model
from tests.support.onnx_files import onnx_loss_file
from tests.support.servables import EXACT


async def test_an_onnx_file_that_cannot_be_read_by_its_path_is_read_by_its_content(tmp_path: Path) -> None:
    """It is compiled, and computes: the mean of the scores of both targets, negative, of which class 0 is ignored."""
    file = tmp_path / "model.onnx"
    file.write_bytes(onnx_loss_file())
    spec = ModelSpec(name="loss", base_path=tmp_path, plugin_config=EXACT)
    network = Network(compile_model(ModelFile(file, spec)))
    scores, target = np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.array([0, 2], np.int64)
    (loss,) = await network.infer([scores, target])
    assert loss == -6


def test_of_an_onnx_file_with_weights_elsewhere_the_first_error_is_told(tmp_path: Path) -> None:
    """Its content alone says less of what is wrong."""
    file = tmp_path / "model.onnx"
    file.write_bytes(onnx_loss_file(weights="weights.data"))
    (tmp_path / "weights.data").write_bytes(np.ones(3, np.float32).tobytes())
    with pytest.raises(ConfigError, match="get_attribute is not implemented") as caught:
        read_model(file)
    assert caught.value.problems[0].file == str(file)
