from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Contents, InferInput, InferRequest
from ovmstrio.core.tensor import ANY_SIZE, Dim, TensorSpec
from ovmstrio.runtimes.models.validation import Validator
from tests.support.servables import contents_request, raw_request
from tests.support.validation import validate

NUMERIC = [name for name in BY_NAME if name != "BYTES"]


def tensor(name: str = "b", datatype: str = "FP32", shape: tuple[int | Dim, ...] = (1, 10), **rest: Any) -> TensorSpec:
    """Make an input; numbers are fixed sizes, -1 is any."""
    sizes = {-1: ANY_SIZE}
    dims = tuple(dim if isinstance(dim, Dim) else sizes.get(dim, Dim.fixed(dim)) for dim in shape)
    return TensorSpec(name, BY_NAME[datatype], dims, **rest)


def asked(
    shape: tuple[int, ...] = (1, 10), datatype: str = "FP32", name: str = "b", contents: Contents | None = None
) -> InferInput:
    """Make one input of a request."""
    return InferInput(name, datatype, shape, contents)


def refusal(specs: list[TensorSpec], request: InferRequest) -> str:
    """Give the text with which a request is refused."""
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
        (ONE, [], [], "Invalid number of inputs - Expected: 1; Actual: 0"),
        (ONE, [asked(), asked(name="c")], [RAW, RAW], "Invalid number of inputs - Expected: 1; Actual: 2"),
        (TWO, [asked(name="x")], [RAW], "Invalid number of inputs - Expected: 2; Actual: 1"),
        # 2: one raw buffer an input
        (TWO, [asked(name="x"), asked(name="y")], [RAW], "Passing data both in .* Expected: 2; Actual: 1"),
        (ONE, [asked()], [RAW, RAW], "Passing data both in .* Expected: 1; Actual: 2"),
        # 3: no contents beside raw buffers
        (
            ONE,
            [asked(contents=Contents("fp32_contents", []))],
            [RAW],
            "Passing data both in InferInputTensor::contents and in raw_input_contents is not allowed",
        ),
        # 4: every input is there by name
        (ONE, [asked(name="c")], [RAW], "Missing input with specific name - Required input: b"),
        (TWO, [asked(name="x"), asked(name="x")], [RAW, RAW], "Missing input with specific name - Required input: y"),
        # 5: no negative dimension
        (ONE, [asked((1, -10))], [RAW], r"Invalid input shape - Expected: \(1,10\); Actual: \(1,-10\); input name: b"),
        # 7: the datatype
        (ONE, [asked(datatype="INT8")], [RAW], "Invalid input precision - Expected: FP32; Actual: INT8; input name: b"),
        (ONE, [asked(datatype="fp32")], [RAW], "Invalid input precision - Expected: FP32; Actual: fp32"),
        (ONE, [asked(datatype="")], [RAW], "Invalid input precision"),
        # 8: the rank
        (
            ONE,
            [asked((1, 2, 3))],
            [RAW],
            r"Invalid number of shape dimensions - Expected: \(1,10\); Actual: \(1,2,3\); input name: b",
        ),
        (ONE, [asked((10,))], [RAW], "Invalid number of shape dimensions"),
        (ONE, [asked(())], [RAW], "Invalid number of shape dimensions"),
        ([tensor(shape=())], [asked((1,))], [bytes(4)], r"Invalid number of shape dimensions - Expected: \(\);"),
        # 9: the batch
        (ONE, [asked((2, 10))], [bytes(80)], "Invalid input batch size - Expected: 1; Actual: 2; input name: b"),
        (ONE, [asked((0, 10))], [b""], "Invalid input batch size - Expected: 1; Actual: 0"),
        (ONE, [asked((2, 11))], [bytes(88)], "Invalid input batch size"),
        ([tensor(shape=(Dim(2, 4), 10))], [asked()], [RAW], r"Invalid input batch size - Expected: \[2~4\]; Actual: 1"),
        ([tensor(shape=(3, 1), batch_axis=1)], [asked((3, 2))], [bytes(24)], "Invalid input batch size - Expected: 1"),
        ([tensor(batch_axis=None)], [asked((2, 10))], [bytes(80)], "Invalid input shape"),
        # 10: all other dimensions
        (
            ONE,
            [asked((1, 11))],
            [bytes(44)],
            r"Invalid input shape - Expected: \(1,10\); Actual: \(1,11\); input name: b",
        ),
        ([tensor(shape=(-1, Dim(2, 4)))], [asked((9, 5))], [bytes(180)], r"Expected: \(-1,\[2~4\]\); Actual: \(9,5\)"),
        # 11: the product of the dimensions
        (
            [tensor(shape=(-1, -1))],
            [asked((2**40, 2**40))],
            [RAW],
            "Invalid content size of tensor proto - Expected: at most",
        ),
        # 12: the bytes of a raw buffer
        (
            ONE,
            [asked()],
            [bytes(36)],
            "Invalid content size of tensor proto - Expected: 40 bytes; Actual: 36 bytes; input name: b",
        ),
        (ONE, [asked()], [bytes(41)], "Expected: 40 bytes; Actual: 41 bytes"),
        (ONE, [asked()], [b""], "Expected: 40 bytes; Actual: 0 bytes"),
        # 13: the number of values
        (
            ONE,
            [asked(contents=Contents("fp32_contents", [0.0] * 9))],
            [],
            "Invalid number of values in tensor proto container - Expected: 10 values; Actual: 9 values; input name: b",
        ),
        (ONE, [asked(contents=Contents("fp32_contents", [0.0] * 11))], [], "Actual: 11 values"),
        (ONE, [asked(contents=Contents("fp64_contents", [0.0] * 10))], [], "Expected: 10 values; Actual: 0 values"),
        (ONE, [asked()], [], "Expected: 10 values; Actual: 0 values"),
    ],
)
def test_every_refusal_in_order(
    specs: list[TensorSpec], inputs: list[InferInput], raws: list[bytes], text: str
) -> None:
    """Each check of OVMS's sequence refuses with its text, and what comes first is named first."""
    message = refusal(specs, InferRequest("m", inputs=inputs, raw_inputs=list(raws)))
    assert re.match(text if text.startswith(("Invalid", "Passing", "Missing")) else f".*{text}", message), message


def test_everything_wrong_is_named_after_the_first() -> None:
    """The first failure starts the text; the other inputs' follow."""
    request = InferRequest(
        "m", inputs=[asked((1, 11), name="y"), asked((2, 10), name="x")], raw_inputs=[bytes(44), bytes(80)]
    )
    message = refusal(TWO, request)
    assert message.startswith("Invalid input batch size - Expected: 1; Actual: 2; input name: x. Also: ")
    assert message.endswith("Invalid input shape - Expected: (1,10); Actual: (1,11); input name: y")


@pytest.mark.parametrize("datatype", NUMERIC)
def test_raw_buffers_of_every_datatype(datatype: str) -> None:
    """A raw buffer becomes an array of the type's dtype, without a copy where it is aligned."""
    kind = BY_NAME[datatype].numpy
    values = np.array([[0, 1, 1], [1, 0, 1]], kind)
    raw = values.tobytes()
    request = InferRequest("m", inputs=[asked((2, 3), datatype)], raw_inputs=[raw])
    array = validate(request, [tensor(datatype=datatype, shape=(2, 3))])["b"]
    np.testing.assert_array_equal(array, values)
    assert array.dtype == kind
    assert np.shares_memory(array, np.frombuffer(raw, np.uint8))


@pytest.mark.parametrize("datatype", [name for name in NUMERIC if name != "BF16"])
def test_contents_of_every_datatype(datatype: str) -> None:
    """Values in the right field become an array of the type's dtype, from lists and from arrays."""
    kind = BY_NAME[datatype].numpy
    values = [True, False, True] if datatype == "BOOL" else [1, 0, 100]
    specs = [tensor(datatype=datatype, shape=(3,))]
    for given_values in (values, np.array(values, kind)):
        array = validate(contents_request("b", datatype, (3,), given_values), specs)["b"]
        np.testing.assert_array_equal(array, np.array(values, kind))
        assert array.dtype == kind


@pytest.mark.parametrize("values", [[1, -2.5, math.inf], np.array([1, -2.5, np.inf], np.float32)])
def test_bf16_is_rounded_from_numbers(values: Any) -> None:
    """Contents are numbers, of which the bits of the nearest BF16 are taken; an array of the type itself is bits."""
    specs = [tensor(datatype="BF16", shape=(3,))]
    bits = np.array([0x3F80, 0xC020, 0x7F80], np.uint16)
    np.testing.assert_array_equal(validate(contents_request("b", "BF16", (3,), values), specs)["b"], bits)
    np.testing.assert_array_equal(validate(contents_request("b", "BF16", (3,), bits), specs)["b"], bits)


@pytest.mark.parametrize(
    ("datatype", "low", "high"),
    [
        (name, int(np.iinfo(BY_NAME[name].numpy).min), int(np.iinfo(BY_NAME[name].numpy).max))
        for name in NUMERIC
        if "INT" in name
    ],
)
def test_integers_have_their_whole_range_and_no_more(datatype: str, low: int, high: int) -> None:
    """The least and greatest values pass unchanged, one beyond is refused."""
    specs = [tensor(datatype=datatype, shape=(2,))]
    array = validate(contents_request("b", datatype, (2,), [low, high]), specs)["b"]
    assert array.tolist() == [low, high]
    for outside in (low - 1, high + 1):
        assert f"{outside} is out of range of {datatype}" in refusal(
            specs, contents_request("b", datatype, (2,), [0, outside])
        )


def test_integers_in_wider_arrays_are_checked() -> None:
    """Values that a codec delivers as a wide array are checked like a list."""
    specs = [tensor(datatype="UINT8", shape=(2,))]
    assert "300 is out of range of UINT8" in refusal(specs, contents_request("b", "UINT8", (2,), np.array([1, 300])))


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("FP32", ["1", "2"]),
        ("FP32", [True, False]),
        ("FP32", [None, 1.0]),
        ("FP64", [10**400, 1]),
        ("FP32", np.array(["a", "b"])),
        ("FP32", np.zeros((2, 1))),
        ("INT32", [1.5, 2.0]),
        ("INT32", [True, False]),
        ("INT32", [[1], [2]]),
        ("BOOL", [1, 0]),
        ("BOOL", np.array([1, 0])),
    ],
)
def test_values_of_another_kind_are_refused(datatype: str, values: Any) -> None:
    """Nothing is turned into a number that is not one."""
    request = contents_request("b", datatype, (2,), values)
    assert refusal([tensor(datatype=datatype, shape=(2,))], request).startswith(
        "Invalid values in tensor proto container"
    )


def test_floats_too_large_for_single_precision_become_infinite() -> None:
    """A double beyond FP32 is infinity, as a cast gives."""
    array = validate(contents_request("b", "FP32", (2,), [1e300, 1]), [tensor(shape=(2,))])["b"]
    assert array.tolist() == [float("inf"), 1.0]


def test_misaligned_buffers_are_copied() -> None:
    """A buffer that starts at an odd address is copied; its values are the same."""
    values = np.arange(10, dtype=np.float32).reshape(1, 10)
    view = memoryview(b"x" + values.tobytes())[1:]
    array = validate(InferRequest("m", inputs=[asked()], raw_inputs=[view]), ONE)["b"]
    assert array.flags.aligned
    np.testing.assert_array_equal(array, values)


def test_empty_and_scalar_tensors_pass() -> None:
    """Zero is a legal size where the model allows it, and a scalar has one value."""
    open_batch = [tensor(shape=(-1, 10))]
    for request in (
        InferRequest("m", inputs=[asked((0, 10))], raw_inputs=[b""]),
        contents_request("b", "FP32", (0, 10), []),
        InferRequest("m", inputs=[asked((0, 10))]),
    ):
        assert validate(request, open_batch)["b"].shape == (0, 10)
    assert validate(contents_request("b", "FP32", (), [2.5]), [tensor(shape=())])["b"].tolist() == 2.5


def test_arrays_come_in_the_order_of_names() -> None:
    """Whatever the order of the request, arrays are sorted by name and belong to it."""
    x, y = np.zeros((1, 10), np.float32), np.ones((1, 10), np.float32)
    arrays = Validator(reversed(TWO))(raw_request({"y": y, "x": x}))  # type: ignore[arg-type]
    assert list(arrays) == ["x", "y"]
    assert arrays["y"].all()


def test_bytes_for_numbers_are_not_implemented() -> None:
    """BYTES for an input that is neither strings, nor a matrix of bytes, nor an image is not supported."""
    request = InferRequest("m", inputs=[asked((1,), "BYTES")], raw_inputs=[b""])
    with pytest.raises(InvalidRequest, match="Functionality not implemented"):
        validate(request, ONE)


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
def test_no_request_raises_anything_but_a_refusal(
    specs: list[TensorSpec], inputs: list[InferInput], raws: list[bytes]
) -> None:
    """Whatever is sent either fits or is the caller's fault, and what fits has the shape asked for."""
    try:
        arrays = validate(InferRequest("m", inputs=inputs, raw_inputs=list(raws)), specs)
    except InvalidRequest:
        return
    for spec in specs:
        assert len(arrays[spec.name].shape) == len(spec.shape)
        assert all(dim.accepts(size) for dim, size in zip(spec.shape, arrays[spec.name].shape, strict=True))
        assert arrays[spec.name].dtype == spec.datatype.numpy


def test_the_last_value_may_stand_for_all_that_are_missing() -> None:
    """Only where the protocol says so, never for none at all, and not for more memory than a message may take."""

    def request(values: list[float], size: int, *, repeat_last: bool = True) -> InferRequest:
        contents = Contents("fp32_contents", values, repeat_last=repeat_last)
        return InferRequest("m", inputs=[asked((size,), contents=contents)])

    specs = [tensor(shape=(-1,))]
    assert validate(request([1, 2], 4), specs)["b"].tolist() == [1, 2, 2, 2]
    assert validate(request([], 0), specs)["b"].tolist() == []
    assert "Expected: 4 values; Actual: 0 values" in refusal(specs, request([], 4))
    assert "Expected: 4 values; Actual: 5 values" in refusal(specs, request([1] * 5, 4))
    assert "Expected: 4 values; Actual: 2 values" in refusal(specs, request([1, 2], 4, repeat_last=False))
    assert "values; Actual: 1 values" in refusal(specs, request([1], 2**24 + 1))


def test_a_request_may_have_both_styles_where_its_protocol_lets_it() -> None:
    """An input without a buffer of its own has contents; one with both is refused."""
    contents = Contents("fp32_contents", [2.0] * 10)
    inputs = [asked(name="x"), asked(name="y", contents=contents)]
    found = validate(InferRequest("m", inputs=inputs, raw_inputs=[RAW, None]), TWO)
    assert (found["x"].sum(), found["y"].sum()) == (0, 20)
    both = "Passing data both in InferInputTensor::contents and in raw_input_contents is not allowed - input name: y"
    assert refusal(TWO, InferRequest("m", inputs=inputs, raw_inputs=[RAW, RAW])) == both


def test_a_wrong_number_of_inputs_is_told_with_all_else_that_is_wrong() -> None:
    """Which are missing, which nobody asked for, and which do not fit; the number comes first, as OVMS says it."""
    specs = [TensorSpec(name, BY_NAME["FP32"], (Dim.fixed(1), Dim.fixed(2))) for name in ("left", "right")]
    wrong = InferInput("left", "INT8", (1, 2))
    stranger = InferInput("rihgt", "FP32", (1, 2))
    with pytest.raises(InvalidRequest) as raised:
        Validator(specs)(InferRequest("m", "", inputs=[wrong]))
    assert raised.value.message.split(". Also: ") == [
        "Invalid number of inputs - Expected: 2; Actual: 1",
        "Invalid input precision - Expected: FP32; Actual: INT8; input name: left",
        "Missing input with specific name - Required input: right",
    ]
    with pytest.raises(InvalidRequest) as raised:
        Validator(specs)(InferRequest("m", "", inputs=[wrong, stranger]))
    assert raised.value.message.split(". Also: ")[1:] == [
        "Missing input with specific name - Required input: right",
        "Unexpected input - rihgt; did you mean 'right'?",
    ]


LISTS: dict[str, list[Any]] = {
    "INT8": [[-128, 127], [128, 0], [1.0, 1], [True, 1]],
    "INT16": [[-(2**15), 2**15 - 1], [2**15, 0]],
    "INT32": [[-(2**31), 2**31 - 1], [-(2**31) - 1, 0]],
    "INT64": [[-(2**63), 2**63 - 1], [2**63, 0]],
    "UINT8": [[0, 255], [-1, 0], [256, 0]],
    "UINT16": [[0, 2**16 - 1], [2**16, 0]],
    "UINT32": [[0, 2**32 - 1], [2**32, 0]],
    "UINT64": [[0, 2**64 - 1], [2**64, 0]],
    "FP16": [[0.1, 1e6], [10**400, 0]],
    "BF16": [[0.1, 1e39]],
    "FP32": [[0.1, 2**24 + 1], [1e39, -1e300], [math.inf, -math.inf], [10**39, 2**64], [10**400, 0], [True, 0]],
    "FP64": [[0.1, 2**53 + 1], [1e308, 10**308], [10**309, 0], ["1", 0]],
    "BOOL": [[True, False], [1, 0]],
}


@pytest.mark.parametrize(("datatype", "values"), [(name, values) for name, rows in LISTS.items() for values in rows])
def test_a_list_of_python_says_what_other_sequences_say(datatype: str, values: list[Any]) -> None:
    """Short ones are read another way, and are the same numbers, or refused in the same words."""
    specs, field = [tensor(datatype=datatype, shape=(1, 2))], BY_NAME[datatype].contents_field
    told: list[Any] = []
    for given_values in (values, tuple(values)):
        request = InferRequest("m", inputs=[asked((1, 2), datatype, contents=Contents(field, given_values))])
        try:
            array = validate(request, specs)["b"]
        except InvalidRequest as error:
            told.append(error.message)
        else:
            told.append((array.dtype, array.shape, array.tobytes()))
    assert told[0] == told[1]


def test_a_shape_that_was_accepted_lets_nothing_else_pass() -> None:
    """Another number of bytes, another shape that does not fit and another type are refused behind it, too."""
    check = Validator([tensor(shape=(Dim(1, 4), 10))])
    good = InferRequest("m", inputs=[asked((2, 10))], raw_inputs=[bytes(80)])
    for _ in range(2):
        assert check(good)["b"].shape == (2, 10)
    for inputs, raw in (
        (asked((2, 10)), bytes(40)),
        (asked((1, 10)), bytes(80)),
        (asked((5, 10)), bytes(200)),
        (asked((2, 10), "INT32"), bytes(80)),
    ):
        with pytest.raises(InvalidRequest):
            check(InferRequest("m", inputs=[inputs], raw_inputs=[raw]))
    assert check(InferRequest("m", inputs=[asked((3, 10))], raw_inputs=[bytes(120)]))["b"].shape == (3, 10)
