from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ovmstrio.core.errors import ConfigError, GraphFailure
from ovmstrio.core.tensor import BY_NAME
from ovmstrio.graphs.calculator import ContractError
from ovmstrio.graphs.calculators import calculator_names, find_calculator
from ovmstrio.graphs.calculators.flow import PASS_THROUGH
from ovmstrio.graphs.graph_config import NodeConfig
from ovmstrio.graphs.packets import OvTensor
from tests.support.graph_nodes import refs, run_nodes

BUILT_IN = [
    "GateCalculator",
    "MuxCalculator",
    "OpenVINOInferenceCalculator",
    "OpenVINOModelServerSessionCalculator",
    "PassThroughCalculator",
    "PyTensorOvTensorConverterCalculator",
    "PythonExecutorCalculator",
]
GUIDE = Path(__file__).parents[4] / "docs" / "calculators.md"

Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(module: str, source: str, entry: str) -> None:
        (tmp_path / f"{module}.py").write_text(source)
        information = tmp_path / f"{module}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(f"[ovmstrio.calculators]\n{entry}\n")

    return add


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return str(found)


def test_built_in_calculators_are_found() -> None:
    assert set(BUILT_IN) <= set(calculator_names())
    assert [kind and kind.name for kind in map(find_calculator, [*BUILT_IN, "NoSuchCalculator"])] == [*BUILT_IN, None]
    assert "NoSuchCalculator" not in calculator_names()


async def test_example_of_the_guide_works(install: Install) -> None:
    entry = block("toml").partition("\n")[2].replace('"', "").strip()
    install("row_argmax", block("python"), entry)
    assert "RowArgmaxCalculator" in calculator_names()
    node = NodeConfig("best", "best", "RowArgmaxCalculator", refs("OVTENSOR:scores"), refs("OVTENSOR:best"))
    scores = np.array([[1, 5, 2], [9, 0, 3]], np.float32)
    ((packet,),) = (await run_nodes([node], [(4, {"scores": OvTensor(BY_NAME["FP32"], scores)})])).values()
    assert (packet.timestamp, packet.value.datatype.name, packet.value.array.tolist()) == (4, "INT64", [1, 0])
    with pytest.raises(GraphFailure, match=r'node "best" failed: expected \[rows, columns\], got \[3\]'):
        await run_nodes([node], [(4, {"scores": OvTensor(BY_NAME["FP32"], scores[0])})])
    kind = find_calculator("RowArgmaxCalculator")
    assert kind is not None
    with pytest.raises(ContractError):
        kind.contract(NodeConfig("best", "best", "RowArgmaxCalculator", refs("scores"), refs("best")))


@pytest.mark.parametrize(
    ("source", "value", "text"),
    [
        ("import nowhere_to_be_found", "broken_one:KIND", "does not load: ModuleNotFoundError: No module named"),
        ("1 / 0", "broken_two:KIND", "does not load: ZeroDivisionError"),
        ("", "broken_three:KIND", "does not load: AttributeError"),
        ("class Kind: pass", "broken_four:Kind", "loads the class Kind, expected an instance"),
        ("KIND = 5", "broken_five:KIND", "loads an object of type int without method contract and load"),
    ],
)
def test_invalid_entry_point_is_an_error_when_used(install: Install, source: str, value: str, text: str) -> None:
    module = value.partition(":")[0]
    install(module, source, f"Broken = {value}")
    assert "Broken" in calculator_names()
    with pytest.raises(ConfigError) as caught:
        find_calculator("Broken")
    assert f"calculator 'Broken': the entry point '{value}' of {module} {text}" in caught.value.message


def test_packages_do_not_replace_built_in_calculators(install: Install) -> None:
    install("usurper", "1 / 0", "PassThroughCalculator = usurper:KIND")
    assert find_calculator("PassThroughCalculator") is PASS_THROUGH
    assert calculator_names().count("PassThroughCalculator") == 1
