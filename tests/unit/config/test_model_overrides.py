"""Settings that come with requests to load models."""

from __future__ import annotations

import pytest

from ovmstrio.config.model_overrides import read_overrides
from ovmstrio.config.specs import BatchSpec, SpecificVersions
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import Dim


def test_both_vocabularies_are_read() -> None:
    """Triton's words become the options that do the same; what only describes is passed over, and told."""
    fields, passed_over = read_overrides(
        '{"name": "m", "platform": "x", "max_batch_size": "8", "nireq": 3,'
        ' "version_policy": {"specific": {"versions": [2]}}, "input": []}'
    )

    assert fields == {
        "batch": BatchSpec(dim=Dim(1, 8)),
        "nireq": 3,
        "version_policy": SpecificVersions(versions=(2,)),
    }
    assert passed_over == ["input", "name", "platform"]


def test_no_batching_is_no_setting() -> None:
    """Triton's 0 says that the model has its own batch."""
    assert read_overrides('{"max_batch_size": 0}') == ({}, [])


def test_everything_that_is_wrong_is_told_at_once() -> None:
    """Keys and values."""
    with pytest.raises(ConfigError) as error:
        read_overrides('{"max_batch_size": 1000000, "nireqs": 1, "nireq": -1}')
    assert len(error.value.problems) == 3
