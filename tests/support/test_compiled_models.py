"""Tests of compiled models that tests share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openvino as ov

from ovmstrio.config.specs import ModelSpec
from ovmstrio.openvino.compile import ModelFile
from tests.support import ir
from tests.support.compiled_models import sharing_compiled_models


def test_equal_models_of_fixed_shapes_are_compiled_once(tmp_path: Path) -> None:
    compiled: list[str] = []

    def compile_(model: ov.Model, source: ModelFile, config: Mapping[str, str]) -> Any:
        compiled.append(source.spec.name)
        return object()

    share = sharing_compiled_models(compile_)

    def load(name: str, model: ov.Model, **config: str) -> Any:
        spec = ModelSpec(name=name, base_path=ir.save(model, tmp_path, name))
        file = tmp_path / name / "1/model.xml"
        return share(ov.Core().read_model(file), ModelFile(file, spec), {"only": "this test", **config})

    first = load("first", ir.accumulator())
    assert load("same", ir.accumulator()) is first
    assert load("settings", ir.accumulator(), NUM_STREAMS="1") is not first
    assert load("weights", ir.accumulator(offset=1.0)) is not first
    assert load("dynamic", ir.dynamic()) is not load("dynamic again", ir.dynamic())
    assert compiled == ["first", "settings", "weights", "dynamic", "dynamic again"]
