from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.openvino.conversion import Conversion, Converted, convert
from ovmstrio.openvino.conversion.inputs import parse_input_form
from tests.support.servables import EXACT

pytest.importorskip("torch", reason="torch is not installed: programs of PyTorch cannot be made or read")

# torch stays out of this process: it is large, and starts threads.
WRITE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(12.0).reshape(3, 4))
            self.layer.bias.fill_(-10.0)
    def forward(self, pixels):
        return torch.relu(self.layer(pixels))

net, pixels = Net().eval(), torch.ones(2, 4)
rows = {"pixels": {0: torch.export.Dim("rows")}}
torch.export.save(torch.export.export(net, (pixels,), dynamic_shapes=rows), "free.pt2")
torch.export.save(torch.export.export(net, (pixels,)), "fixed.pt2")
torch.jit.save(torch.jit.trace(net, pixels), "traced.pt")
torch.jit.save(torch.jit.script(net), "scripted.pt")
torch.save(net.state_dict(), "weights.pt")
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    (folder / "write.py").write_text(WRITE)  # TorchScript wants to read its source
    subprocess.run([sys.executable, "write.py"], cwd=folder, check=True, capture_output=True, timeout=300)
    return folder


def _converted(source: Path, folder: Path, *inputs: str) -> Converted:
    return convert(source, folder, "net", wanted=Conversion(inputs=dict(map(parse_input_form, inputs))))


@pytest.mark.parametrize(
    ("file", "framework", "inputs", "forms"),
    [
        ("free.pt2", "PyTorch export", ["FP32 [-1,4]"], ()),
        ("fixed.pt2", "PyTorch export", ["FP32 [2,4]"], ()),
        ("traced.pt", "TorchScript", ["FP32 [-1,-1]"], ()),
        ("traced.pt", "TorchScript", ["FP32 [-1,4]"], ("pixels=[-1,4]",)),
        ("scripted.pt", "TorchScript", ["FP32 [-1,4]"], ("pixels=FP32[-1,4]",)),
    ],
)
def test_program_computes_the_same(
    written: Path, tmp_path: Path, file: str, framework: str, inputs: list[str], forms: tuple[str, ...]
) -> None:
    converted = _converted(written / file, tmp_path, *forms)
    assert converted.framework == framework
    assert [(spec.name, str(spec)) for spec in converted.inputs] == [("pixels", inputs[0])]
    compiled = ov.Core().compile_model(converted.directory / "model.xml", "CPU", EXACT)
    pixels = np.array([[1, 0, 2, 0], [0, 1, 0, 1]], np.float32)
    expected = np.maximum(pixels @ np.arange(12, dtype=np.float32).reshape(3, 4).T - 10, 0)
    assert compiled({"pixels": pixels}, share_inputs=True)[0].tolist() == expected.tolist()


def test_scripted_program_needs_types_and_shapes_of_its_inputs(written: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dimensions of 'pixels'; tell them: --input 'pixels=FP32\[-1,\.\.\.\]'"):
        _converted(written / "scripted.pt", tmp_path)


def test_weights_are_no_program(written: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no program; .*torch\.export\.save"):
        _converted(written / "weights.pt", tmp_path)


def test_damaged_program_is_refused_in_one_line(written: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "half.pt2", "w") as archive:
        archive.writestr("half/archive_format", "pt2")
    with pytest.raises(ConfigError, match=r"half\.pt2: torch cannot read it: .*torch\.export\.save\(\)") as raised:
        _converted(tmp_path / "half.pt2", tmp_path)
    assert "\n" not in str(raised.value)
