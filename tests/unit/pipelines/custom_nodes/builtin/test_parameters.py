"""Reading the parameters of built-in nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.pipelines.custom_nodes.builtin.builtin_node import BUILTIN_NAMES, builtin_name
from tests.support.custom_nodes import opened_builtin

PACKAGE = "ovmstrio.runtimes.pipelines.custom_nodes.builtin."
SIZES = {
    "original_image_width": 8,
    "original_image_height": 8,
    "target_image_width": 4,
    "target_image_height": 4,
    "confidence_threshold": 0.5,
}


async def problems_of(builtin: str, **params: object) -> dict[str, tuple[str, str]]:
    """Open a node that cannot be opened, and give what is expected and found by parameter."""
    with pytest.raises(ConfigError) as raised:
        await opened_builtin(builtin, **params)
    return {problem.path: (problem.expected, problem.found) for problem in raised.value.problems}


async def test_all_problems_are_told_at_once() -> None:
    """Missing ones and wrong ones."""
    assert await problems_of(
        "face_blur",
        original_image_height="0",
        target_image_width="x",
        gaussian_blur_kernel_size=4,
        original_image_layout="CHW",
    ) == {
        "params.original_image_width": ("a whole number from 1 on", ""),
        "params.original_image_height": ("a whole number from 1 on", "'0'"),
        "params.original_image_layout": ("NCHW or NHWC", "'CHW'"),
        "params.target_image_width": ("a whole number from 1 on", "'x'"),
        "params.target_image_height": ("a whole number from 1 on", ""),
        "params.confidence_threshold": ("a number from 0 to 1", ""),
        "params.gaussian_blur_kernel_size": ("an odd number from 1 to 32767", "'4'"),
    }


@pytest.mark.parametrize(
    ("builtin", "params", "path"),
    [
        ("add_one", {"add_number": -1}, "add_number"),
        ("add_one", {"sub_number": -1}, "sub_number"),
        ("add_one", {"output_queue_size": 0}, "output_queue_size"),
        ("horizontal_ocr", {**SIZES, "confidence_threshold": 1.5}, "confidence_threshold"),
        ("horizontal_ocr", {**SIZES, "max_output_batch": 0}, "max_output_batch"),
        ("east_ocr", {**SIZES, "original_image_width": 6}, "original_image_width"),
        ("east_ocr", {**SIZES, "overlap_threshold": "nan"}, "overlap_threshold"),
        ("model_zoo_intel_object_detection", {**SIZES, "filter_label_id": -2}, "filter_label_id"),
        ("image_transformation", {}, "original_image_layout"),
        ("image_transformation", {"original_image_layout": "NCHW", "scale": 0}, "scale"),
        ("image_transformation", {"original_image_layout": "NCHW", "scale_values": "[1,0,1]"}, "scale_values"),
        ("image_transformation", {"original_image_layout": "NCHW", "mean_values": "[1,2]"}, "mean_values"),
        ("image_transformation", {"original_image_layout": "NCHW", "mean_values": "1,2,3"}, "mean_values"),
        ("image_transformation", {"original_image_layout": "NCHW", "target_image_width": 0}, "target_image_width"),
        ("image_transformation", {"original_image_layout": "NCHW", "scale_values": "[]"}, "scale_values"),
    ],
)
async def test_values_out_of_bounds_are_refused(builtin: str, params: dict[str, object], path: str) -> None:
    """Only what is wrong is told."""
    assert list(await problems_of(builtin, **params)) == [f"params.{path}"]


async def test_what_is_no_number_where_there_is_a_default_warns() -> None:
    """The default is taken, as OVMS takes it; so do unknown parameters and unclear truth values."""
    with capture_logs() as logs:
        await opened_builtin("horizontal_ocr", **SIZES, max_output_batch="many", debug="yes", overlap_treshold=1)
    assert [entry["problem"].partition(": ")[0] for entry in logs] == [
        "params.debug",
        "params.max_output_batch",
        "params.overlap_treshold",
    ]
    assert all(entry["log_level"] == "warning" for entry in logs)


async def test_without_opencv_only_nodes_for_images_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way out is told."""
    for module in [name for name in sys.modules if name.startswith(PACKAGE)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "cv2", None)
    await opened_builtin("add_one")
    with pytest.raises(ConfigError, match=r"face_blur needs OpenCV; install it: .* -m pip install .*\[vision\]"):
        await opened_builtin("face_blur")


def test_names_and_container_paths_mean_built_in_nodes(tmp_path: Path) -> None:
    """A file of that name elsewhere does not."""
    for name in BUILTIN_NAMES:
        assert builtin_name(Path(name)) == name
        assert builtin_name(Path(f"/ovms/lib/custom_nodes/libcustom_node_{name}.so")) == name
    for path in (Path("/ovms/lib/custom_nodes/libcustom_node_other.so"), tmp_path / "libcustom_node_add_one.so"):
        assert builtin_name(path) is None
