from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

import ovmstrio_samples
from ovmstrio_samples import embedded, prepare_repository
from ovmstrio_samples.add_one import client as add_one
from ovmstrio_samples.catalog import BY_NAME
from ovmstrio_samples.ensemble.prepare import build_bayes
from ovmstrio_samples.file_type import client as file_type
from ovmstrio_samples.iris import client as iris
from ovmstrio_samples.iris.flowers import FLOWERS as DEMO_FLOWERS
from ovmstrio_samples.preparing import prepare_sample
from ovmstrio_samples.question import Ask, Question
from ovmstrio_samples.wheels import WheelUnavailable

# Rows of Fisher's data set that the demo does not use.
_FLOWERS = [
    ((4.9, 3.0, 1.4, 0.2), "setosa"),
    ((4.4, 2.9, 1.4, 0.2), "setosa"),
    ((5.7, 4.4, 1.5, 0.4), "setosa"),
    ((6.4, 3.2, 4.5, 1.5), "versicolor"),
    ((5.5, 2.3, 4.0, 1.3), "versicolor"),
    ((5.7, 2.8, 4.1, 1.3), "versicolor"),
    ((5.8, 2.7, 5.1, 1.9), "virginica"),
    ((7.7, 2.6, 6.9, 2.3), "virginica"),
    ((5.9, 3.0, 5.1, 1.8), "virginica"),
]


def _title(question: Question) -> str:
    return f"{question.model}: {question.subject}"


@pytest.mark.parametrize("question", [*add_one.questions(), *iris.questions(), *file_type.questions()], ids=_title)
def test_every_question_of_the_demo_is_answered_rightly(ask: Ask, question: Question) -> None:
    """The models give the answers that the demo expects."""
    assert question.read(ask(question.model, question.inputs)) == question.expected


def test_flowers_of_the_data_set_are_recognised(ask: Ask) -> None:
    """Nine more flowers get their species, in one batch, with probabilities that add up to one."""
    outputs = ask("iris", {"features": np.array([sizes for sizes, _ in _FLOWERS], np.float32)})
    assert [iris.species(label) for label in outputs["label"]] == [species for _, species in _FLOWERS]
    np.testing.assert_allclose(outputs["probabilities"].sum(axis=1), 1, atol=1e-6)
    assert outputs["probabilities"].argmax(axis=1).tolist() == outputs["label"].tolist()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'#!/bin/sh\nset -e\nfor f in *.txt; do\n  echo "$f"\n  wc -l "$f"\ndone\nexit 0\n' * 4, "shell"),
        (
            b"<!DOCTYPE html>\n<html><head><title>Hi</title></head>\n<body><p>Text <b>bold</b></p></body></html>\n" * 3,
            "html",
        ),
        (b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog /Pages 2 0 R >>\nendobj\ntrailer << /Root 1 0 R >>\n%%EOF\n", "pdf"),
        (b"SELECT id, name FROM flowers WHERE petal_length > 4.5 ORDER BY name;\n" * 8, "sql"),
    ],
)
def test_files_of_other_kinds_are_recognised(ask: Ask, content: bytes, kind: str) -> None:
    """Content made here gets the label of its kind."""
    question = file_type.ask_about(kind, content)
    assert question.read(ask(question.model, question.inputs)) == kind


def test_the_features_of_a_file_are_its_two_ends() -> None:
    """White space around is dropped, the middle left out, and padding fills what is short."""
    row = file_type.features(b"  \n" + b"a" * 3000 + b"b" * 3000 + b"\n\n")[0]
    assert row.shape == (2048,)
    assert set(row[:1024]) == {ord("a")}
    assert set(row[1024:]) == {ord("b")}
    short = file_type.features(b"\nxy\n")[0]
    assert short[:4].tolist() == [*b"xy\n", 256]
    assert short[-4:].tolist() == [256, *b"\nxy"]
    assert set(file_type.features(b"")[0]) == {256}


def test_the_repository_is_written_once_and_found_again(tmp_path: Path) -> None:
    """A second call gives the same configuration and touches nothing."""
    config = prepare_repository(tmp_path)
    models = {
        entry["config"]["name"]: entry["config"]["base_path"]
        for entry in json.loads(config.read_text())["model_config_list"]
    }
    names = ["add_one", "iris", "file_type", "ensemble_regression", "ensemble_bayes"]
    assert models == {name: name for name in names}
    for base_path in models.values():
        assert any((config.parent / base_path / "1").iterdir())
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert prepare_repository(tmp_path) == config
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times
    assert [path.name for path in tmp_path.iterdir()] == [config.parent.name]


def test_without_the_extra_the_other_samples_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where magika is not installed its sample is left out, and asking for it names the extra."""
    monkeypatch.setattr(embedded, "installed_files", lambda: None)
    config = prepare_repository(tmp_path)
    models = json.loads(config.read_text())["model_config_list"]
    assert [entry["config"]["name"] for entry in models] == ["add_one", "iris", "ensemble_regression", "ensemble_bayes"]
    with pytest.raises(WheelUnavailable, match=r"pip install .*\[samples\]"):
        prepare_sample(BY_NAME["file_type"], tmp_path / "models", 1, tmp_path)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_sample_is_complete(name: str) -> None:
    """Each sample of the table has its README, its preparation and its client, and says how to run it."""
    folder = Path(ovmstrio_samples.__file__).parent / name
    assert {"README.md", "prepare.py", "client.py"} <= {path.name for path in folder.iterdir()}
    assert f"python -m ovmstrio_samples.{name}.client" in (folder / "README.md").read_text()


def test_the_second_classifier_knows_the_flowers() -> None:
    """Naive Bayes alone names the three flowers, with probabilities that add up to one."""
    flowers = np.array([sizes for sizes, _ in DEMO_FLOWERS], np.float32)
    probabilities = ov.Core().compile_model(build_bayes(), "CPU")(flowers)[0]
    assert probabilities.argmax(axis=1).tolist() == [0, 1, 2]
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)
