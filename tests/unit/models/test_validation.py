from __future__ import annotations

import io
import math
import re
import struct
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ovmstrio.core.errors import InvalidRequest, NotSupported
from ovmstrio.core.request import Buffer, Contents, InferInput, InferRequest
from ovmstrio.core.tensor import ANY_SIZE, BY_NAME, BYTES, Dim, Tensor, TensorSpec
from ovmstrio.encoding import image_files
from ovmstrio.encoding.raw_contents import buffer_of
from ovmstrio.models import tensor_contents as strings
from ovmstrio.models.tensor_contents import rows_to_strings
from ovmstrio.models.validation import Validator, validated
from tests.support.servables import contents_request, raw_request, validate

NUMERIC = [name for name in BY_NAME if name != "BYTES"]


def tensor(name: str = "b", datatype: str = "FP32", shape: tuple[int | Dim, ...] = (1, 10), **rest: Any) -> TensorSpec:
    sizes = {-1: ANY_SIZE}
    dims = tuple(dim if isinstance(dim, Dim) else sizes.get(dim, Dim.fixed(dim)) for dim in shape)
    return TensorSpec(name, BY_NAME[datatype], dims, **rest)


def input_(
    shape: tuple[int, ...] = (1, 10), datatype: str = "FP32", name: str = "b", contents: Contents | None = None
) -> InferInput:
    return InferInput(name, datatype, shape, contents)


def values(field: str, count: int) -> Contents:
    return Contents(f"{field}_contents", [0.0] * count)


def refusal(specs: list[TensorSpec], request: InferRequest) -> str:
    with pytest.raises(InvalidRequest) as caught:
        validate(request, specs)
    return caught.value.message


RAW = bytes(40)
ONE = [tensor()]
TWO = [tensor("x"), tensor("y")]


@pytest.mark.parametrize(
    ("specs", "inputs", "raws", "text"),
    [
        # 1: the number of inputs
        (ONE, [], [], "number of inputs - Expected: 1; Actual: 0"),
        (ONE, [input_(), input_(name="c")], [RAW, RAW], "number of inputs - Expected: 1; Actual: 2"),
        (TWO, [input_(name="x")], [RAW], "number of inputs - Expected: 2; Actual: 1"),
        # 2: one raw buffer an input
        (TWO, [input_(name="x"), input_(name="y")], [RAW], "Passing data both in .* Expected: 2; Actual: 1"),
        (ONE, [input_()], [RAW, RAW], "Passing data both in .* Expected: 1; Actual: 2"),
        # 3: no contents in addition to raw buffers
        (
            ONE,
            [input_(contents=values("fp32", 0))],
            [RAW],
            "Passing data both in .* in raw_input_contents is not allowed",
        ),
        # 4: every input is there by name
        (ONE, [input_(name="c")], [RAW], "Missing input with specific name - Required input: b"),
        (TWO, [input_(name="x"), input_(name="x")], [RAW, RAW], "Missing input with specific name - Required input: y"),
        # 5: no negative dimension
        (ONE, [input_((1, -10))], [RAW], r"input shape - .*\(1,10\); Actual: \(1,-10\)"),
        # 7: the datatype
        (ONE, [input_(datatype="INT8")], [RAW], "input precision - Expected: FP32; Actual: INT8; input name: b"),
        (ONE, [input_(datatype="fp32")], [RAW], "input precision - Expected: FP32; Actual: fp32"),
        (ONE, [input_(datatype="")], [RAW], "input precision"),
        # 8: the rank
        (ONE, [input_((1, 2, 3))], [RAW], r"number of shape dimensions - Expected: \(1,10\); Actual: \(1,2,3\); input"),
        (ONE, [input_((10,))], [RAW], "number of shape dimensions"),
        (ONE, [input_(())], [RAW], "number of shape dimensions"),
        ([tensor(shape=())], [input_((1,))], [bytes(4)], r"number of shape dimensions - Expected: \(\);"),
        # 9: the batch
        (ONE, [input_((2, 10))], [bytes(80)], "input batch size - Expected: 1; Actual: 2; input name: b"),
        (ONE, [input_((0, 10))], [b""], "input batch size - Expected: 1; Actual: 0"),
        (ONE, [input_((2, 11))], [bytes(88)], "input batch size"),
        ([tensor(shape=(Dim(2, 4), 10))], [input_()], [RAW], r"input batch size - Expected: \[2~4\]; Actual: 1"),
        ([tensor(shape=(3, 1), batch_axis=1)], [input_((3, 2))], [bytes(24)], "input batch size - Expected: 1"),
        ([tensor(batch_axis=None)], [input_((2, 10))], [bytes(80)], "input shape"),
        # 10: all other dimensions
        (ONE, [input_((1, 11))], [bytes(44)], r"input shape - Expected: \(1,10\); Actual: \(1,11\); input name: b"),
        ([tensor(shape=(-1, Dim(2, 4)))], [input_((9, 5))], [bytes(180)], r".*: \(-1,\[2~4\]\); Actual: \(9,5\)"),
        # 11: the product of the dimensions
        ([tensor(shape=(-1, -1))], [input_((2**40, 2**40))], [RAW], "content size of tensor proto - Expected: at most"),
        ([tensor(shape=(-1, -1))], [input_((0, 2**62))], [b""], "content size of tensor proto - Expected: at most"),
        ([tensor(shape=(-1, -1))], [input_((0, 2**62))], [], "content size of tensor proto - Expected: at most"),
        ([tensor("b", "BYTES", (-1, -1))], [input_((0, 2**62), "BYTES")], [b""], "content size .* Expected: at most"),
        # A tensor without elements may have a bounded number of rows.
        ([tensor(shape=(-1, -1))], [input_((2**31, 0))], [b""], "input shape - Expected: at most 1048576 rows"),
        ([tensor(shape=(-1, -1, -1))], [input_((2**15, 2**15, 0))], [], "input shape - Expected: at most 1048576 rows"),
        ([tensor("b", "BYTES", (-1, -1))], [input_((2**31, 0), "BYTES")], [b""], "input shape - Expected: at most"),
        # 12: the bytes of a raw buffer
        (
            ONE,
            [input_()],
            [bytes(36)],
            "content size of tensor proto - Expected: 40 bytes; Actual: 36 bytes; input name",
        ),
        (ONE, [input_()], [bytes(41)], ".*Expected: 40 bytes; Actual: 41 bytes"),
        (ONE, [input_()], [b""], ".*Expected: 40 bytes; Actual: 0 bytes"),
        # 13: the number of values
        (
            ONE,
            [input_(contents=values("fp32", 9))],
            [],
            "number of values .* Expected: 10 values; Actual: 9 values; input",
        ),
        (ONE, [input_(contents=values("fp32", 11))], [], ".*Actual: 11 values"),
        (ONE, [input_(contents=values("fp64", 10))], [], ".*Expected: 10 values; Actual: 0 values"),
        (ONE, [input_()], [], ".*Expected: 10 values; Actual: 0 values"),
        # BYTES are for strings, images and matrices of bytes
        (ONE, [input_((1,), "BYTES")], [b""], "Functionality not implemented"),
    ],
)
def test_each_check_refuses_with_the_text_of_ovms_in_its_order(
    specs: list[TensorSpec], inputs: list[InferInput], raws: list[bytes], text: str
) -> None:
    message = refusal(specs, InferRequest("m", inputs=inputs, raw_inputs=list(raws)))
    assert re.match(f"(Invalid )?{text}", message), message


@pytest.mark.parametrize("datatype", NUMERIC)
def test_raw_buffers_of_every_datatype_are_read_in_place(datatype: str) -> None:
    kind = BY_NAME[datatype].numpy
    values = np.array([[0, 1, 1], [1, 0, 1]], kind)
    raw = values.tobytes()
    request = InferRequest("m", inputs=[input_((2, 3), datatype)], raw_inputs=[raw])
    array = validate(request, [tensor(datatype=datatype, shape=(2, 3))])["b"]
    np.testing.assert_array_equal(array, values)
    assert array.dtype == kind
    assert np.shares_memory(array, np.frombuffer(raw, np.uint8))


@pytest.mark.parametrize("datatype", [name for name in NUMERIC if name != "BF16"])
def test_contents_of_every_datatype_are_read_from_lists_and_arrays(datatype: str) -> None:
    kind = BY_NAME[datatype].numpy
    numbers: list[int] = [True, False, True] if datatype == "BOOL" else [1, 0, 100]
    if "INT" in datatype:
        numbers[:2] = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    specs = [tensor(datatype=datatype, shape=(3,))]
    for given_values in (numbers, tuple(numbers), np.array(numbers, kind)):
        array = validate(contents_request("b", datatype, (3,), given_values), specs)["b"]
        np.testing.assert_array_equal(array, np.array(numbers, kind))
        assert array.dtype == kind


@pytest.mark.parametrize(
    ("datatype", "contents", "text"),
    [
        *(
            (name, [0, outside], f".*{outside} is out of range of {name}")
            for name in NUMERIC
            if "INT" in name
            for outside in (int(np.iinfo(BY_NAME[name].numpy).min) - 1, int(np.iinfo(BY_NAME[name].numpy).max) + 1)
        ),
        ("UINT8", np.array([1, 300]), ".*300 is out of range of UINT8"),
        *(
            (name, contents, "Invalid values in tensor proto container")
            for name, contents in (
                ("FP32", ["1", "2"]),
                ("FP32", [True, False]),
                ("FP32", [None, 1.0]),
                ("FP64", [10**400, 1]),
                ("FP16", [10**400, 1]),
                ("FP64", ["1", 0]),
                ("FP32", [True, 0]),
                ("INT8", [1.0, 1]),
                ("INT8", [True, 1]),
                ("FP32", np.array(["a", "b"])),
                ("FP32", np.zeros((2, 1))),
                ("INT32", [1.5, 2.0]),
                ("INT32", [True, False]),
                ("INT32", [[1], [2]]),
                ("BOOL", [1, 0]),
                ("BOOL", np.array([1, 0])),
            )
        ),
    ],
)
def test_values_of_another_kind_or_range_are_refused(datatype: str, contents: Any, text: str) -> None:
    for values_ in (contents, tuple(contents)) if isinstance(contents, list) else (contents,):
        message = refusal([tensor(datatype=datatype, shape=(2,))], contents_request("b", datatype, (2,), values_))
        assert re.match(text, message), message


@pytest.mark.parametrize("numbers", [[1, -2.5, math.inf], np.array([1, -2.5, np.inf], np.float32)])
def test_bf16_is_rounded_from_numbers_and_read_from_bits(numbers: Any) -> None:
    specs = [tensor(datatype="BF16", shape=(3,))]
    bits = np.array([0x3F80, 0xC020, 0x7F80], np.uint16)
    np.testing.assert_array_equal(validate(contents_request("b", "BF16", (3,), numbers), specs)["b"], bits)
    np.testing.assert_array_equal(validate(contents_request("b", "BF16", (3,), bits), specs)["b"], bits)


@pytest.mark.parametrize(
    ("datatype", "numbers"),
    [
        ("FP16", [0.1, 1e6]),
        ("FP32", [0.1, 2**24 + 1]),
        ("FP32", [1e39, -1e300]),
        ("FP32", [10**39, 2**64]),
        ("FP32", [math.inf, -math.inf]),
        ("FP64", [0.1, 2**53 + 1]),
        ("FP64", [1e308, 10**308]),
    ],
)
def test_numbers_are_rounded_to_the_datatype_or_infinite(datatype: str, numbers: list[Any]) -> None:
    # Short lists are read in another way than other sequences.
    for contents in (numbers, tuple(numbers)):
        array = validate(contents_request("b", datatype, (2,), contents), [tensor(datatype=datatype, shape=(2,))])["b"]
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(array, np.array([float(each) for each in numbers]).astype(array.dtype))


def test_misaligned_buffers_are_copied() -> None:
    values = np.arange(10, dtype=np.float32).reshape(1, 10)
    view = memoryview(b"x" + values.tobytes())[1:]
    array = validate(InferRequest("m", inputs=[input_()], raw_inputs=[view]), ONE)["b"]
    assert array.flags.aligned
    np.testing.assert_array_equal(array, values)


def test_empty_tensors_and_scalars_are_read() -> None:
    open_batch = [tensor(shape=(-1, 10))]
    for request in (
        InferRequest("m", inputs=[input_((0, 10))], raw_inputs=[b""]),
        contents_request("b", "FP32", (0, 10), []),
        InferRequest("m", inputs=[input_((0, 10))]),
    ):
        assert validate(request, open_batch)["b"].shape == (0, 10)
    assert validate(contents_request("b", "FP32", (), [2.5]), [tensor(shape=())])["b"].tolist() == 2.5


def test_arrays_are_in_the_order_of_names() -> None:
    x, y = np.zeros((1, 10), np.float32), np.ones((1, 10), np.float32)
    arrays = Validator(reversed(TWO))(raw_request({"y": y, "x": x}))  # type: ignore[arg-type]
    assert list(arrays) == ["x", "y"]
    assert arrays["y"].all()


ANY_SPEC = st.builds(
    tensor,
    name=st.sampled_from(["a", "b"]),
    datatype=st.sampled_from(list(BY_NAME)),
    shape=st.lists(st.sampled_from([1, 2, -1, Dim(1, 3)]), max_size=4).map(tuple),
    layout=st.sampled_from(["", "NHWC", "NCHW"]),
)
ANY_VALUES = st.one_of(
    st.lists(st.one_of(st.integers(), st.floats(), st.booleans(), st.binary(), st.text(), st.none()), max_size=6),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(lambda v: np.array(v, np.int64)),
)
ANY_INPUT = st.builds(
    InferInput,
    name=st.sampled_from(["a", "b"]),
    datatype=st.one_of(st.sampled_from(list(BY_NAME)), st.text(max_size=5)),
    shape=st.lists(st.one_of(st.integers(0, 3), st.integers()), max_size=4).map(tuple),
    contents=st.none()
    | st.builds(Contents, field=st.sampled_from([row.contents_field for row in BY_NAME.values()]), values=ANY_VALUES),
)


@given(
    specs=st.lists(ANY_SPEC, min_size=1, max_size=2, unique_by=lambda spec: spec.name),
    inputs=st.lists(ANY_INPUT, max_size=2),
    raws=st.lists(st.binary(max_size=48), max_size=2),
)
def test_any_request_is_read_or_refused(specs: list[TensorSpec], inputs: list[InferInput], raws: list[bytes]) -> None:
    try:
        arrays = validate(InferRequest("m", inputs=inputs, raw_inputs=list(raws)), specs)
    except InvalidRequest:
        return
    for spec in specs:
        assert len(arrays[spec.name].shape) == len(spec.shape)
        assert all(dim.accepts(size) for dim, size in zip(spec.shape, arrays[spec.name].shape, strict=True))
        assert arrays[spec.name].dtype == spec.datatype.numpy


def test_last_value_is_repeated_if_the_protocol_allows_it() -> None:
    def request(values: list[float], size: int, *, repeat_last: bool = True) -> InferRequest:
        contents = Contents("fp32_contents", values, repeat_last=repeat_last)
        return InferRequest("m", inputs=[input_((size,), contents=contents)])

    specs = [tensor(shape=(-1,))]
    assert validate(request([1, 2], 4), specs)["b"].tolist() == [1, 2, 2, 2]
    assert validate(request([], 0), specs)["b"].tolist() == []
    assert "Expected: 4 values; Actual: 0 values" in refusal(specs, request([], 4))
    assert "Expected: 4 values; Actual: 5 values" in refusal(specs, request([1] * 5, 4))
    assert "Expected: 4 values; Actual: 2 values" in refusal(specs, request([1, 2], 4, repeat_last=False))
    assert "values; Actual: 1 values" in refusal(specs, request([1], 2**24 + 1))


def test_raw_buffers_and_contents_can_be_mixed_by_input() -> None:
    contents = Contents("fp32_contents", [2.0] * 10)
    inputs = [input_(name="x"), input_(name="y", contents=contents)]
    found = validate(InferRequest("m", inputs=inputs, raw_inputs=[RAW, None]), TWO)
    assert (found["x"].sum(), found["y"].sum()) == (0, 20)
    both = "Passing data both in InferInputTensor::contents and in raw_input_contents is not allowed - input name: y"
    assert refusal(TWO, InferRequest("m", inputs=inputs, raw_inputs=[RAW, RAW])) == both


@pytest.mark.parametrize(
    ("inputs", "problems"),
    [
        (
            [input_(datatype="INT8", name="left")],
            [
                "Invalid number of inputs - Expected: 2; Actual: 1",
                "Invalid input precision - Expected: FP32; Actual: INT8; input name: left",
                "Missing input with specific name - Required input: right",
            ],
        ),
        (
            [input_(datatype="INT8", name="left"), input_(name="rihgt")],
            [
                "Invalid input precision - Expected: FP32; Actual: INT8; input name: left",
                "Missing input with specific name - Required input: right",
                "Unexpected input - rihgt; did you mean 'right'?",
            ],
        ),
        (
            [input_((1, 11), name="right"), input_((2, 10), name="left")],
            [
                "Invalid input batch size - Expected: 1; Actual: 2; input name: left",
                "Invalid input shape - Expected: (1,10); Actual: (1,11); input name: right",
            ],
        ),
    ],
)
def test_all_problems_of_a_request_are_reported(inputs: list[InferInput], problems: list[str]) -> None:
    raws: list[Any] = [bytes(4 * math.prod(each.shape)) for each in inputs]
    message = refusal([tensor("left"), tensor("right")], InferRequest("m", inputs=inputs, raw_inputs=raws))
    assert message.split(". Also: ") == problems


def test_accepted_shape_lets_no_other_request_pass() -> None:
    check = Validator([tensor(shape=(Dim(1, 4), 10))])
    good = InferRequest("m", inputs=[input_((2, 10))], raw_inputs=[bytes(80)])
    for _ in range(2):
        assert check(good)["b"].shape == (2, 10)
    for inputs, raw in (
        (input_((2, 10)), bytes(40)),
        (input_((1, 10)), bytes(80)),
        (input_((5, 10)), bytes(200)),
        (input_((2, 10), "INT32"), bytes(80)),
    ):
        with pytest.raises(InvalidRequest):
            check(InferRequest("m", inputs=[inputs], raw_inputs=[raw]))
    assert check(InferRequest("m", inputs=[input_((3, 10))], raw_inputs=[bytes(120)]))["b"].shape == (3, 10)


MISSING = "Functionality not implemented"
CHANNELS = "Invalid number of channels in binary input"
RGB = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10


def encoded(pixels: np.ndarray[Any, Any], kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def image_spec(*shape: int | Dim, datatype: str = "UINT8", layout: str = "NHWC") -> TensorSpec:
    dims = tuple(dim if isinstance(dim, Dim) else ANY_SIZE if dim == -1 else Dim.fixed(dim) for dim in shape)
    return TensorSpec("image", BY_NAME[datatype], dims, 0, layout)


def send(*files: bytes, shape: tuple[int, ...] | None = None) -> InferRequest:
    return contents_request("image", "BYTES", (len(files),) if shape is None else shape, list(files))


def pixels_of(tensor: TensorSpec, *files: bytes) -> np.ndarray[Any, Any]:
    return validate(send(*files), [tensor])["image"]


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16", "INT16", "UINT8", "INT8", "UINT16", "INT32"])
@pytest.mark.parametrize("layout", ["NHWC", "?HWC", "", "N...", "...", "N...C"])
def test_pixels_are_bgr_and_cast_without_scaling(datatype: str, layout: str) -> None:
    array = pixels_of(image_spec(1, 2, 4, 3, datatype=datatype, layout=layout), encoded(RGB))
    np.testing.assert_array_equal(array[0], RGB[..., ::-1].astype(BY_NAME[datatype].numpy))
    assert array.flags.c_contiguous


def test_images_of_any_channels_and_depth_make_a_batch() -> None:
    rgba = np.concatenate([RGB, np.full((2, 4, 1), 7, np.uint8)], axis=2)
    np.testing.assert_array_equal(pixels_of(image_spec(1, 2, 4, 4), encoded(rgba))[0], rgba[..., [2, 1, 0, 3]])
    np.testing.assert_array_equal(pixels_of(image_spec(1, 2, 4, 1), encoded(RGB[..., 0]))[0], RGB[..., :1])
    deep = np.array([[0, 1000], [40000, 65535]], np.uint16)
    np.testing.assert_array_equal(pixels_of(image_spec(1, 2, 2, 1, datatype="UINT16"), encoded(deep))[0, ..., 0], deep)
    batch = pixels_of(image_spec(-1, 2, 4, 3), encoded(RGB), encoded(RGB[::-1]))
    np.testing.assert_array_equal(batch, np.stack([RGB, RGB[::-1]])[..., ::-1])


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (6, 8, (6, 8)),
        (Dim(3, 9), Dim(1, 3), (3, 3)),
        (Dim(1, 9), Dim(1, 9), (2, 4)),
        (Dim(3, -1), -1, (3, 4)),
        (-1, -1, (2, 4)),
    ],
)
def test_images_are_resized_to_fixed_sizes_and_to_the_bounds_of_ranges(
    height: int | Dim, width: int | Dim, expected: tuple[int, int]
) -> None:
    assert pixels_of(image_spec(1, height, width, 3), encoded(RGB)).shape == (1, *expected, 3)


def test_resizing_is_bilinear() -> None:
    edge = np.array([[[0, 0, 0], [200, 200, 200]]], np.uint8)
    assert pixels_of(image_spec(1, 1, 4, 3), encoded(edge))[0, 0, :, 0].tolist() == [0, 50, 150, 200]


@pytest.mark.parametrize("kind", ["JPEG", "BMP", "WEBP", "GIF", "TIFF"])
def test_usual_formats_are_decoded(kind: str) -> None:
    array = pixels_of(image_spec(1, 16, 16, 3), encoded(np.full((16, 16, 3), 120, np.uint8), kind))
    assert abs(int(array.mean()) - 120) <= 2


@pytest.mark.parametrize(
    ("tensor", "request_", "text"),
    [
        (
            image_spec(1, 2, 4, 3),
            send(b"junk"),
            "Image parsing failed - its 4 bytes are not an image of a known format (JPEG, PNG,",
        ),
        (image_spec(1, 2, 4, 3), send(encoded(RGB)[:45]), "Image parsing failed"),
        (image_spec(1, 2, 4, 3), send(b""), "Bytes contents empty"),
        (image_spec(1, 2, 4, 3), send(encoded(RGB[..., 0])), f"{CHANNELS} - Expected: 3; Actual: 1"),
        (image_spec(1, 2, 4, 1), send(encoded(RGB)), f"{CHANNELS} - Expected: 1; Actual: 3"),
        (image_spec(1, 2, 4, 3), send(encoded(RGB), encoded(RGB)), "Invalid input batch size - Expected: 1; Actual: 2"),
        (
            image_spec(1, 2, 4, 3),
            send(encoded(RGB), shape=(2,)),
            "Invalid input batch size - Expected: 2; Actual: 1 images",
        ),
        (image_spec(-1, 2, 4, 3), send(), "Invalid input batch size - Expected: -1; Actual: 0"),
        (
            image_spec(1, 2, 4, 3),
            send(encoded(RGB), shape=(1, 1)),
            "Invalid number of shape dimensions - Expected: (-1)",
        ),
        (image_spec(1, 3, 2, 4, layout="NCHW"), send(encoded(RGB)), "Unsupported layout for encoded images"),
        (image_spec(2, -1, -1, 3), send(encoded(RGB), encoded(RGB[:1])), "Binary images resolution mismatch"),
        (image_spec(1, 2, 4, 3, datatype="INT64"), send(encoded(RGB)), f"{MISSING} - encoded images for INT64"),
    ],
)
def test_invalid_images_are_refused(tensor: TensorSpec, request_: InferRequest, text: str) -> None:
    assert refusal([tensor], request_).startswith(text)


def test_huge_images_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "MAX_PIXELS", 7)
    assert re.search("2 x 4 pixels|4 x 2 pixels", refusal([image_spec(1, 2, 4, 3)], send(encoded(RGB))))


@given(
    st.integers(0, 200),
    st.binary(min_size=1, max_size=8),
    st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"]),
)
def test_damaged_images_are_refused_or_decoded(position: int, damage: bytes, kind: str) -> None:
    file = bytearray(encoded(RGB, kind))
    file[position : position + len(damage)] = damage
    try:
        array = pixels_of(image_spec(1, 2, 4, 3), bytes(file))
    except InvalidRequest:
        return
    assert array.shape == (1, 2, 4, 3)


NATIVE = [TensorSpec("s", BYTES, (ANY_SIZE,))]
MATRIX = [TensorSpec("s", BY_NAME["UINT8"], (ANY_SIZE, ANY_SIZE))]


def framed(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def raw(shape: tuple[int, ...], buffer: Buffer) -> InferRequest:
    return InferRequest("m", inputs=[InferInput("s", "BYTES", shape)], raw_inputs=[buffer])


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4, 1)])
def test_native_strings_are_read_from_raw_buffers_and_contents(shape: tuple[int, ...]) -> None:
    elements = [b"a", b"", b"\xff\x00\x00", b"long" * 100]
    specs = [TensorSpec("s", BYTES, (ANY_SIZE,) * len(shape))]
    for request in (
        raw(shape, framed(*elements)),
        raw(shape, memoryview(bytearray(framed(*elements)))),
        contents_request("s", "BYTES", shape, elements),
    ):
        array = validate(request, specs)["s"]
        assert array.shape == shape
        assert array.ravel().tolist() == elements
    assert validate(contents_request("s", "BYTES", (1,), ["é"]), NATIVE)["s"].tolist() == ["é".encode()]


@pytest.mark.parametrize(
    ("buffer", "text"),
    [
        (b"\x01", "1 bytes left, expected a 4-byte length"),
        (framed(b"ab")[:-1], "an element has 2 bytes, 1 bytes left"),
        (framed(b"ab") + b"xyz", "3 bytes left"),
        (b"\xff\xff\xff\xff", "an element has 4294967295 bytes, 0 bytes left"),
    ],
)
@pytest.mark.parametrize("specs", [NATIVE, MATRIX])
def test_invalid_framing_is_refused(buffer: bytes, text: str, specs: list[TensorSpec]) -> None:
    message = refusal(specs, raw((1,), buffer))
    assert message.startswith("Inputs inside buffer do")
    assert text in message


def test_native_strings_must_fit_the_shape() -> None:
    two = [TensorSpec("s", BYTES, (Dim.fixed(2),))]
    assert refusal(two, raw((1, 2), b"")).startswith("Invalid number of shape dimensions")
    assert refusal(two, raw((3,), b"")).startswith("Invalid input shape - Expected: (2); Actual: (3); input name: s")
    assert "Expected: 2 strings; Actual: 1 strings" in refusal(two, raw((2,), framed(b"a")))
    assert refusal(two, raw((-2,), b"")).startswith("Invalid input shape")


def test_number_and_total_length_of_strings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(NATIVE, raw((2**25 + 1,), b"")).startswith("String max size exceeded")
    monkeypatch.setattr(strings, "MAX_BYTES", 100)
    for specs in (NATIVE, MATRIX):
        assert refusal(specs, raw((2,), framed(b"a", b"b" * 60))).startswith("String max size exceeded")


def test_strings_become_rows_padded_with_zeros() -> None:
    for request in (raw((2,), framed(b"ab", b"cde")), contents_request("s", "BYTES", (2,), [b"ab", b"cde"])):
        assert validate(request, MATRIX)["s"].tolist() == [[97, 98, 0, 0], [99, 100, 101, 0]]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (raw((1, 1), framed(b"a")), r"Invalid number of shape dimensions - Expected: (-1); Actual: (1,1)"),
        (raw((2,), framed(b"a")), "Invalid input batch size - Expected: 2; Actual: 1 strings"),
        (raw((0,), b""), "Invalid input batch size - Expected: at least 1; Actual: no strings"),
        (raw((3,), framed(b"a", b"b", b"c")), "Invalid input batch size - Expected: [1~2]; Actual: 3"),
        (raw((1,), framed(b"abcd")), "Invalid input shape - Expected: ([1~2],4); Actual: (1,5)"),
    ],
)
def test_strings_that_do_not_fit_a_matrix_are_refused(request_: InferRequest, text: str) -> None:
    specs = [TensorSpec("s", BY_NAME["UINT8"], (Dim(1, 2), Dim.fixed(4)))]
    assert refusal(specs, request_).startswith(text)


def test_uint8_outputs_named_string_become_strings() -> None:
    rows = np.frombuffer(b"ab\0\0cd\0eabcd", np.uint8).reshape(3, 4)
    given = rows_to_strings(Tensor("label_string", BY_NAME["UINT8"], rows))
    assert given.datatype is BYTES
    assert given.array.tolist() == [b"ab", b"cd", b"abcd"]
    for kept in (Tensor("label", BY_NAME["UINT8"], rows), Tensor("x_string", BY_NAME["INT8"], rows.view(np.int8))):
        assert rows_to_strings(kept) is kept


NUMBERS = [datatype for datatype in BY_NAME.values() if datatype.name != "BYTES"]


@pytest.mark.parametrize("datatype", NUMBERS, ids=lambda each: each.name)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0, 3), (2, 0)], ids=str)
def test_buffer_holds_the_elements_in_order(datatype: Any, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).astype(datatype.numpy).reshape(shape)
    buffer = buffer_of(array)
    assert bytes(buffer) == array.tobytes()
    assert len(buffer) == array.nbytes


@pytest.mark.parametrize("is_writeable", [True, False])
def test_buffer_of_a_contiguous_array_is_a_view(is_writeable: bool) -> None:
    array = np.zeros((2, 3), np.float32)
    array.flags.writeable = is_writeable
    view = np.frombuffer(buffer_of(array), np.float32)
    assert np.shares_memory(array, view)
    assert view.flags.writeable is is_writeable


def test_buffer_of_a_strided_array_is_copied_in_the_order_of_rows() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert bytes(buffer_of(array.T)) == array.T.copy().tobytes()
    assert bytes(buffer_of(array[:, ::2])) == np.array([[0, 2], [3, 5]], np.int16).tobytes()


def test_an_image_without_pillow_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ovmstrio.encoding.image_files", raising=False)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(NotSupported, match=r"Pillow.*extra images"):
        pixels_of(image_spec(1, 2, 4, 3), b"P6 1 1 255 " + bytes(3))


# Threads


def _framed(*elements: bytes) -> InferRequest:
    raw = b"".join(struct.pack("<I", len(each)) + each for each in elements)
    return InferRequest("model", inputs=[InferInput("b", "BYTES", (len(elements),))], raw_inputs=[raw])


@pytest.mark.parametrize(
    ("request_", "is_threaded"),
    [
        (_framed(b"short"), False),
        (_framed(bytes(20_000)), True),
        (_framed(*[b""] * 5_000), True),
        (contents_request("b", "BYTES", (1,), ["short"]), False),
        (contents_request("b", "BYTES", (2,), [bytes(10_000), "x" * 10_000]), True),
        (contents_request("b", "BYTES", (5_000,), [b""] * 5_000), True),
        (contents_request("b", "BYTES", (1,), [1]), False),
        (raw_request({"b": np.zeros(100_000, np.float32)}), False),
        (InferRequest("model", inputs=[input_(datatype="BYTES"), input_(datatype="BYTES")], raw_inputs=[b""]), False),
    ],
)
async def test_long_strings_and_images_are_read_outside_of_the_event_loop(
    request_: InferRequest, *, is_threaded: bool
) -> None:
    thread = await validated(lambda given: (given is request_, threading.get_ident()), request_)
    assert thread[0]
    assert (thread[1] != threading.get_ident()) is is_threaded
