"""Outputs in files and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ovms_cli.tensor_output import as_json, write_outputs
from ovmstrio.core.errors import InvalidRequest


def test_numbers_that_json_does_not_have_are_texts() -> None:
    """Every reader of JSON can read the answer."""
    plain = as_json({"y": np.array([[1.5, np.nan], [np.inf, -np.inf]], np.float32)})
    assert json.loads(json.dumps(plain, allow_nan=False)) == {"y": [[1.5, "NaN"], ["Infinity", "-Infinity"]]}


def test_bytes_that_numpy_would_cut_are_refused(tmp_path: Path) -> None:
    """What is saved is what came; the rest is not saved."""
    saved = tmp_path / "y.npy"
    write_outputs({"y": np.array([b"a\0b", b""], object)}, str(saved))
    assert np.load(saved).tolist() == [b"a\0b", b""]
    with pytest.raises(InvalidRequest, match="end in zeros"):
        write_outputs({"y": np.array([b"a\0"], object)}, str(tmp_path / "z.npy"))
