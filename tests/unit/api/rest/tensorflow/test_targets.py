"""Paths below ``/v1/models``, read."""

from __future__ import annotations

import pytest

from ovmstrio.api.tensorflow.rest.routes import ModelTarget, read_target
from ovmstrio.core.errors import InvalidRequest, MethodNotAllowed, NotFound


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "m:predict", ModelTarget("predict", "m", "")),
        ("POST", "m/versions/3:predict", ModelTarget("predict", "m", "3")),
        ("POST", "m/versions/0:predict", ModelTarget("predict", "m", "0")),
        ("POST", "m/labels/stable:predict", ModelTarget("predict", "m", "")),
        ("POST", "llama:7b:predict", ModelTarget("predict", "llama:7b", "")),
        ("POST", "a b é:predict", ModelTarget("predict", "a b é", "")),
        ("GET", "m", ModelTarget("status", "m", "")),
        ("GET", "m/", ModelTarget("status", "m", "")),
        ("GET", "m/versions/12", ModelTarget("status", "m", "12")),
        ("GET", "m/labels/stable", ModelTarget("status", "m", "")),
        ("GET", "m/metadata", ModelTarget("metadata", "m", "")),
        ("GET", "m/versions/1/metadata", ModelTarget("metadata", "m", "1")),
        ("GET", "metadata", ModelTarget("status", "metadata", "")),
        ("GET", "metadata/metadata", ModelTarget("metadata", "metadata", "")),
        ("HEAD", "m", ModelTarget("status", "m", "")),
    ],
)
def test_paths_name_servable_version_and_operation(method: str, path: str, expected: ModelTarget) -> None:
    """A label names the default version, and a name may hold anything but a slash."""
    assert read_target(method, path) == expected


@pytest.mark.parametrize(
    ("method", "path", "error", "text"),
    [
        ("GET", "m:predict", MethodNotAllowed, "Unsupported method"),
        ("GET", "m/versions/1:classify", MethodNotAllowed, "Unsupported method"),
        ("POST", "m", MethodNotAllowed, "Unsupported method"),
        ("POST", "m/metadata", MethodNotAllowed, "Unsupported method"),
        ("POST", "m/versions/1/metadata", MethodNotAllowed, "Unsupported method"),
        ("POST", "m:classify", NotFound, "Requested REST resource not found"),
        ("POST", "m/labels/x:regress", NotFound, "Requested REST resource not found"),
        ("POST", "m/versions/one:predict", InvalidRequest, "Invalid request URL"),
        ("POST", "m/versions/:predict", InvalidRequest, "Invalid request URL"),
        ("POST", "m/versions/-1:predict", InvalidRequest, "Invalid request URL"),
        ("POST", "m/versions/\u0661:predict", InvalidRequest, "Invalid request URL"),
        ("GET", "m/versions/1/2", InvalidRequest, "Invalid request URL"),
        ("GET", "m/versions/1/labels/x", InvalidRequest, "Invalid request URL"),
        ("GET", "/", InvalidRequest, "Invalid request URL"),
        ("POST", "m/infer", InvalidRequest, "Invalid request URL"),
        ("POST", f"m/versions/{2**63}:predict", NotFound, "Model with requested version is not found"),
        ("GET", f"m/versions/{'9' * 5000}", NotFound, "Model with requested version is not found"),
    ],
)
def test_other_paths_are_refused(method: str, path: str, error: type[Exception], text: str) -> None:
    """Wrong methods, operations that models do not have, and what is no path of this API differ."""
    with pytest.raises(error) as caught:
        read_target(method, path)
    assert type(caught.value) is error
    assert str(caught.value).startswith(text)
