from __future__ import annotations

import math
import re
from typing import Any

import hypothesis
import numpy as np
import pytest
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
    sizes = {-1: ANY_SIZE}
    dims = tuple(dim if isinstance(dim, Dim) else sizes.get(dim, Dim.fixed(dim)) for dim in shape)
    return TensorSpec(name, BY_NAME[datatype], dims, **rest)


def given(
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
        (ONE, [given(), given(name="c")], [RAW, RAW], "number of inputs - Expected: 1; Actual: 2"),
        (TWO, [given(name="x")], [RAW], "number of inputs - Expected: 2; Actual: 1"),
        # 2: one raw buffer an input
        (TWO, [given(name="x"), given(name="y")], [RAW], "Passing data both in .* Expected: 2; Actual: 1"),
        (ONE, [given()], [RAW, RAW], "Passing data both in .* Expected: 1; Actual: 2"),
        # 3: no contents in addition to raw buffers
        (
            ONE,
            [given(contents=values("fp32", 0))],
            [RAW],
            "Passing data both in .* in raw_input_contents is not allowed",
        ),
        # 4: every input is there by name
        (ONE, [given(name="c")], [RAW], "Missing input with specific name - Required input: b"),
        (TWO, [given(name="x"), given(name="x")], [RAW, RAW], "Missing input with specific name - Required input: y"),
        # 5: no negative dimension
        (ONE, [given((1, -10))], [RAW], r"input shape - Expected: \(1,10\); Actual: \(1,-10\); input name: b"),
        # 7: the datatype
        (ONE, [given(datatype="INT8")], [RAW], "input precision - Expected: FP32; Actual: INT8; input name: b"),
        (ONE, [given(datatype="fp32")], [RAW], "input precision - Expected: FP32; Actual: fp32"),
        (ONE, [given(datatype="")], [RAW], "input precision"),
        # 8: the rank
        (ONE, [given((1, 2, 3))], [RAW], r"number of shape dimensions - Expected: \(1,10\); Actual: \(1,2,3\); input"),
        (ONE, [given((10,))], [RAW], "number of shape dimensions"),
        (ONE, [given(())], [RAW], "number of shape dimensions"),
        ([tensor(shape=())], [given((1,))], [bytes(4)], r"number of shape dimensions - Expected: \(\);"),
        # 9: the batch
        (ONE, [given((2, 10))], [bytes(80)], "input batch size - Expected: 1; Actual: 2; input name: b"),
        (ONE, [given((0, 10))], [b""], "input batch size - Expected: 1; Actual: 0"),
        (ONE, [given((2, 11))], [bytes(88)], "input batch size"),
        ([tensor(shape=(Dim(2, 4), 10))], [given()], [RAW], r"input batch size - Expected: \[2~4\]; Actual: 1"),
        ([tensor(shape=(3, 1), batch_axis=1)], [given((3, 2))], [bytes(24)], "input batch size - Expected: 1"),
        ([tensor(batch_axis=None)], [given((2, 10))], [bytes(80)], "input shape"),
        # 10: all other dimensions
        (ONE, [given((1, 11))], [bytes(44)], r"input shape - Expected: \(1,10\); Actual: \(1,11\); input name: b"),
        ([tensor(shape=(-1, Dim(2, 4)))], [given((9, 5))], [bytes(180)], r".*: \(-1,\[2~4\]\); Actual: \(9,5\)"),
        # 11: the product of the dimensions
        ([tensor(shape=(-1, -1))], [given((2**40, 2**40))], [RAW], "content size of tensor proto - Expected: at most"),
        # 12: the bytes of a raw buffer
        (
            ONE,
            [given()],
            [bytes(36)],
            "content size of tensor proto - Expected: 40 bytes; Actual: 36 bytes; input name",
        ),
        (ONE, [given()], [bytes(41)], ".*Expected: 40 bytes; Actual: 41 bytes"),
        (ONE, [given()], [b""], ".*Expected: 40 bytes; Actual: 0 bytes"),
        # 13: the number of values
        (
            ONE,
            [given(contents=values("fp32", 9))],
            [],
            "number of values .* Expected: 10 values; Actual: 9 values; input",
        ),
        (ONE, [given(contents=values("fp32", 11))], [], ".*Actual: 11 values"),
        (ONE, [given(contents=values("fp64", 10))], [], ".*Expected: 10 values; Actual: 0 values"),
        (ONE, [given()], [], ".*Expected: 10 values; Actual: 0 values"),
        # BYTES are for strings, images and matrices of bytes
        (ONE, [given((1,), "BYTES")], [b""], "Functionality not implemented"),
    ],
)
def test_each_check_refuses_with_the_text_of_ovms_in_its_order(
    specs: list[TensorSpec], inputs: list[InferInput], raws: list[bytes], text: str
) -> None:
    message = refusal(specs, InferRequest("m", inputs=inputs, raw_inputs=list(raws)))
    assert re.match(f"(Invalid )?{text}", message), message


def test_all_problems_are_reported_after_the_first() -> None:
    request = InferRequest(
        "m", inputs=[given((1, 11), name="y"), given((2, 10), name="x")], raw_inputs=[bytes(44), bytes(80)]
    )
    message = refusal(TWO, request)
    assert message.startswith("Invalid input batch size - Expected: 1; Actual: 2; input name: x. Also: ")
    assert message.endswith("Invalid input shape - Expected: (1,10); Actual: (1,11); input name: y")


@pytest.mark.parametrize("datatype", NUMERIC)
def test_raw_buffers_of_every_datatype_are_read_in_place(datatype: str) -> None:
    kind = BY_NAME[datatype].numpy
    values = np.array([[0, 1, 1], [1, 0, 1]], kind)
    raw = values.tobytes()
    request = InferRequest("m", inputs=[given((2, 3), datatype)], raw_inputs=[raw])
    array = validate(request, [tensor(datatype=datatype, shape=(2, 3))])["b"]
    np.testing.assert_array_equal(array, values)
    assert array.dtype == kind
    assert np.shares_memory(array, np.frombuffer(raw, np.uint8))


@pytest.mark.parametrize("datatype", [name for name in NUMERIC if name != "BF16"])
def test_contents_of_every_datatype_are_read_from_lists_and_arrays(datatype: str) -> None:
    kind = BY_NAME[datatype].numpy
    numbers = [True, False, True] if datatype == "BOOL" else [1, 0, 100]
    if "INT" in datatype:
        numbers[:2] = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    specs = [tensor(datatype=datatype, shape=(3,))]
    for given_values in (numbers, np.array(numbers, kind)):
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
    message = refusal([tensor(datatype=datatype, shape=(2,))], contents_request("b", datatype, (2,), contents))
    assert re.match(text, message), message


@pytest.mark.parametrize("numbers", [[1, -2.5, math.inf], np.array([1, -2.5, np.inf], np.float32)])
def test_bf16_is_rounded_from_numbers_and_read_from_bits(numbers: Any) -> None:
    specs = [tensor(datatype="BF16", shape=(3,))]
    bits = np.array([0x3F80, 0xC020, 0x7F80], np.uint16)
    np.testing.assert_array_equal(validate(contents_request("b", "BF16", (3,), numbers), specs)["b"], bits)
    np.testing.assert_array_equal(validate(contents_request("b", "BF16", (3,), bits), specs)["b"], bits)


def test_numbers_too_large_for_fp32_are_infinite() -> None:
    array = validate(contents_request("b", "FP32", (2,), [1e300, 1]), [tensor(shape=(2,))])["b"]
    assert array.tolist() == [float("inf"), 1.0]


def test_misaligned_buffers_are_copied() -> None:
    values = np.arange(10, dtype=np.float32).reshape(1, 10)
    view = memoryview(b"x" + values.tobytes())[1:]
    array = validate(InferRequest("m", inputs=[given()], raw_inputs=[view]), ONE)["b"]
    assert array.flags.aligned
    np.testing.assert_array_equal(array, values)


def test_empty_tensors_and_scalars_are_read() -> None:
    open_batch = [tensor(shape=(-1, 10))]
    for request in (
        InferRequest("m", inputs=[given((0, 10))], raw_inputs=[b""]),
        contents_request("b", "FP32", (0, 10), []),
        InferRequest("m", inputs=[given((0, 10))]),
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


@hypothesis.given(
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
        return InferRequest("m", inputs=[given((size,), contents=contents)])

    specs = [tensor(shape=(-1,))]
    assert validate(request([1, 2], 4), specs)["b"].tolist() == [1, 2, 2, 2]
    assert validate(request([], 0), specs)["b"].tolist() == []
    assert "Expected: 4 values; Actual: 0 values" in refusal(specs, request([], 4))
    assert "Expected: 4 values; Actual: 5 values" in refusal(specs, request([1] * 5, 4))
    assert "Expected: 4 values; Actual: 2 values" in refusal(specs, request([1, 2], 4, repeat_last=False))
    assert "values; Actual: 1 values" in refusal(specs, request([1], 2**24 + 1))


def test_raw_buffers_and_contents_can_be_mixed_by_input() -> None:
    contents = Contents("fp32_contents", [2.0] * 10)
    inputs = [given(name="x"), given(name="y", contents=contents)]
    found = validate(InferRequest("m", inputs=inputs, raw_inputs=[RAW, None]), TWO)
    assert (found["x"].sum(), found["y"].sum()) == (0, 20)
    both = "Passing data both in InferInputTensor::contents and in raw_input_contents is not allowed - input name: y"
    assert refusal(TWO, InferRequest("m", inputs=inputs, raw_inputs=[RAW, RAW])) == both


def test_wrong_number_of_inputs_is_reported_with_all_other_problems() -> None:
    specs = [TensorSpec(name, BY_NAME["FP32"], (Dim.fixed(1), Dim.fixed(2))) for name in ("left", "right")]
    wrong = InferInput("left", "INT8", (1, 2))
    unknown = InferInput("rihgt", "FP32", (1, 2))
    with pytest.raises(InvalidRequest) as raised:
        Validator(specs)(InferRequest("m", "", inputs=[wrong]))
    assert raised.value.message.split(". Also: ") == [
        "Invalid number of inputs - Expected: 2; Actual: 1",
        "Invalid input precision - Expected: FP32; Actual: INT8; input name: left",
        "Missing input with specific name - Required input: right",
    ]
    with pytest.raises(InvalidRequest) as raised:
        Validator(specs)(InferRequest("m", "", inputs=[wrong, unknown]))
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
def test_lists_and_tuples_have_equal_results(datatype: str, values: list[Any]) -> None:
    specs, field = [tensor(datatype=datatype, shape=(1, 2))], BY_NAME[datatype].contents_field
    results: list[Any] = []
    for given_values in (values, tuple(values)):
        request = InferRequest("m", inputs=[given((1, 2), datatype, contents=Contents(field, given_values))])
        try:
            array = validate(request, specs)["b"]
        except InvalidRequest as error:
            results.append(error.message)
        else:
            results.append((array.dtype, array.shape, array.tobytes()))
    assert results[0] == results[1]


def test_accepted_shape_lets_no_other_request_pass() -> None:
    check = Validator([tensor(shape=(Dim(1, 4), 10))])
    good = InferRequest("m", inputs=[given((2, 10))], raw_inputs=[bytes(80)])
    for _ in range(2):
        assert check(good)["b"].shape == (2, 10)
    for inputs, raw in (
        (given((2, 10)), bytes(40)),
        (given((1, 10)), bytes(80)),
        (given((5, 10)), bytes(200)),
        (given((2, 10), "INT32"), bytes(80)),
    ):
        with pytest.raises(InvalidRequest):
            check(InferRequest("m", inputs=[inputs], raw_inputs=[raw]))
    assert check(InferRequest("m", inputs=[given((3, 10))], raw_inputs=[bytes(120)]))["b"].shape == (3, 10)
