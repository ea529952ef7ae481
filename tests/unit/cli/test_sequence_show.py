"""What is kept and shown of the steps of a sequence."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from ovms_cli.sequence_run import StepAnswer
from ovms_cli.sequence_show import Keeping, show
from ovms_cli.tables import Output
from ovmstrio.core.errors import InvalidRequest


def _answers(*values: float) -> Generator[StepAnswer]:
    for step, value in enumerate(values):
        outputs = {"y": np.full((1, 2), value, np.float32), "word": np.array([f"{value:g}".encode()], object)}
        yield StepAnswer(step, 0.002, outputs)


def test_the_summary_tells_what_the_values_were(capsys: pytest.CaptureFixture[str]) -> None:
    """Lowest, mean, highest and the last step; texts have only the last."""
    show(_answers(1, 6, 2), 17, 3, Keeping(), Output.TABLE)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["y", "float32", "[1,", "2]", "1", "3", "6", "2,", "2"] in lines
    assert ["word", "bytes", "[1]", "-", "-", "-", "b'2'"] in lines
    summary = " ".join(lines[-1])
    assert summary.startswith("3 steps in ")
    assert "median 2.00, p99 2.00, max 2.00; sequence 17 has ended" in summary


def test_json_is_a_line_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Step, sequence, time and outputs."""
    show(_answers(1, 6), 17, 2, Keeping(), Output.JSON)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {
            "step": step,
            "sequence_id": 17,
            "milliseconds": 2.0,
            "outputs": {"y": [[value, value]], "word": [f"{value:g}"]},
        }
        for step, value in enumerate((1.0, 6.0))
    ]


@pytest.mark.parametrize(("axis", "shape"), [(None, (3, 1, 2)), (0, (3, 2)), (1, (1, 6)), (-1, (1, 6))])
def test_outputs_are_stacked_or_joined(tmp_path: Path, axis: int | None, shape: tuple[int, ...]) -> None:
    """A new first axis, or one that is there."""
    answers = (StepAnswer(step, 0.0, {"y": np.full((1, 2), step, np.float32)}) for step in range(3))
    show(answers, 1, 3, Keeping.of(str(tmp_path / "y.npy"), axis), Output.JSON)
    saved = np.load(tmp_path / "y.npy")
    assert saved.shape == shape
    assert saved.reshape(-1).tolist() == [0, 0, 1, 1, 2, 2]


def test_outputs_that_cannot_be_joined_end_the_sequence_at_once(tmp_path: Path) -> None:
    """The first step that shows it is the last, and the sequence is closed."""
    closed = []

    def answers() -> Generator[StepAnswer]:
        try:
            for size in (1, 1, 2, 1):
                yield StepAnswer(0, 0.0, {"y": np.zeros((size, 2))})
        finally:
            closed.append(size)

    with pytest.raises(InvalidRequest, match=r'"y": \[1, 2\] and \[2, 2\] cannot be stacked; see --join'):
        show(answers(), 1, 4, Keeping.of(str(tmp_path / "y.npz"), None), Output.JSON)
    assert closed == [2]
    with pytest.raises(InvalidRequest, match="cannot be joined along axis 5"):
        show(answers(), 1, 4, Keeping.of(str(tmp_path / "y.npz"), 5), Output.JSON)
    assert closed == [2, 1]


def test_several_outputs_do_not_go_into_one_array(tmp_path: Path) -> None:
    """Which is said at the first step."""
    with pytest.raises(InvalidRequest, match=r"the model gives y, word; save several outputs as \.npz"):
        show(_answers(1, 2), 1, 2, Keeping.of(str(tmp_path / "y.npy"), None), Output.JSON)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("", "give --output, too"),
        ("table", "a file ending in"),
        ("y.txt", "a file ending in"),
        ("/nowhere/y.npy", "there is no folder /nowhere"),
    ],
)
def test_a_file_that_cannot_be_is_refused(file: str, text: str) -> None:
    """Before anything is called."""
    with pytest.raises(InvalidRequest, match=text):
        Keeping.of(file, 0)
