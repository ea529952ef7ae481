from __future__ import annotations

from pathlib import Path

import pytest

from ovmstrio.config.mapping import MAPPING_FILE, NO_MAPPING, TensorMapping, read_mapping
from ovmstrio.core.errors import ConfigError


def test_names_are_mapped(tmp_path: Path) -> None:
    """Both sections are read; either may be left out."""
    (tmp_path / MAPPING_FILE).write_text('{"inputs": {"x:0": "image"}, "outputs": {"y": "label"}}')
    assert read_mapping(tmp_path) == TensorMapping({"x:0": "image"}, {"y": "label"})
    (tmp_path / MAPPING_FILE).write_text('{"outputs": {"y": "label"}}')
    assert read_mapping(tmp_path) == TensorMapping({}, {"y": "label"})


def test_without_a_file_there_is_no_mapping(tmp_path: Path) -> None:
    """Most models have none, and some are no directory."""
    assert read_mapping(tmp_path) is NO_MAPPING
    (tmp_path / "model.onnx").touch()
    assert read_mapping(tmp_path / "model.onnx") is NO_MAPPING


def test_all_mistakes_are_told(tmp_path: Path) -> None:
    """Unknown keys, wrong types and an alias for two tensors, each with its line."""
    path = tmp_path / MAPPING_FILE
    path.write_text('{"inputs": {"a": "x",\n "b": "x"},\n"output": {},\n"outputs": {"c": 1}}')
    with pytest.raises(ConfigError) as error:
        read_mapping(tmp_path)
    assert [(problem.file, problem.line, problem.path) for problem in error.value.problems] == [
        (str(path), 2, "inputs.b"),
        (str(path), 3, "output"),
        (str(path), 4, "outputs.c"),
    ]


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """Here it is a directory."""
    (tmp_path / MAPPING_FILE).mkdir()
    with pytest.raises(ConfigError, match="the mapping cannot be read: Is a directory"):
        read_mapping(tmp_path)
