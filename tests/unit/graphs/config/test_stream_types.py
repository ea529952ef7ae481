from __future__ import annotations

import pytest

from ovmstrio.core.request import InferRequest, InferResponse
from ovmstrio.runtimes.graphs.packets import (
    ImageFrame,
    MediaPipeTensor,
    OvTensor,
    TfTensor,
    stream_type,
    tag_for,
    type_name,
)
from pyovms import HttpPayload, Tensor


@pytest.mark.parametrize(
    ("tag", "kind"),
    [
        ("OVMS_PY_TENSOR", Tensor),
        ("OVMS_PY_TENSOR_IMAGE", Tensor),
        ("OVTENSOR1", OvTensor),
        ("TENSOR", MediaPipeTensor),
        ("TFTENSOR_X", TfTensor),
        ("IMAGE", ImageFrame),
        ("REQUEST", InferRequest),
        ("RESPONSE", InferResponse),
        ("HTTP_REQUEST_PAYLOAD", HttpPayload),
        ("HTTP_RESPONSE_PAYLOAD", Tensor),
        ("", OvTensor),
    ],
)
def test_tags_are_known_by_how_they_begin(tag: str, kind: type) -> None:
    """Suffixes are free, and every other tag is OpenVINO's tensor."""
    assert stream_type(tag) is kind


def test_types_are_told_by_their_names() -> None:
    """A type has the name that its users know, and the tag that stands for it."""
    assert (tag_for(Tensor), type_name(Tensor)) == ("OVMS_PY_TENSOR", "pyovms.Tensor")
    assert (tag_for(bool), type_name(bool)) == (None, "bool")
