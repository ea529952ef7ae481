from __future__ import annotations

import array
import copy
import gc
import io
import operator
import pickle
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.graphs.python_nodes.api.buffer_exporter import Exporter, over_array, over_buffer
from pyovms import Context, Storage, Tensor, current_context

ROWS = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}


@pytest.mark.parametrize(("datatype", "code"), ROWS.items())
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_tensor_of_an_array_has_its_buffer(datatype: str, code: str, shape: tuple[int, ...]) -> None:
    source = np.ones(shape, code)
    tensor, expected = Tensor("x", source), source.data
    view = tensor.data
    assert (tensor.name, tensor.shape, tensor.datatype, tensor.size) == ("x", shape, datatype, source.nbytes)
    assert (view.shape, view.format, view.itemsize, view.strides) == (
        expected.shape,
        expected.format,
        expected.itemsize,
        expected.strides,
    )
    assert bytes(tensor) == source.tobytes()
    assert tensor.ref_obj is source


@pytest.mark.parametrize(("datatype", "code"), ROWS.items())
@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 2)])
def test_a_tensor_of_a_request_has_the_format_of_its_datatype(datatype: str, code: str, shape: tuple[int, ...]) -> None:
    source = np.ones(shape, code)
    tensor = Tensor._from_request("x", source.tobytes(), shape, datatype)
    assert (tensor.shape, tensor.datatype, tensor.data.format, tensor.data.shape) == (shape, datatype, code, shape)
    assert tensor.size == source.nbytes
    np.testing.assert_array_equal(np.array(tensor), source)


@pytest.mark.parametrize("datatype", ["my_string", "BYTES", "BF16", ""])
def test_a_request_of_another_datatype_is_plain_bytes(datatype: str) -> None:
    tensor = Tensor._from_request("x", bytearray(b"null0terminated0string0"), (3,), datatype)
    assert (tensor.shape, tensor.datatype, tensor.data.format, tensor.data.shape) == ((3,), datatype, "B", (23,))
    assert (bytes(tensor), tensor.data.readonly, tensor.ref_obj) == (b"null0terminated0string0", True, None)


@pytest.mark.parametrize("source", [np.array(["my", "batched", "string"]), np.array("one")])
def test_a_tensor_of_text_keeps_the_format_of_numpy(source: np.ndarray[Any, Any]) -> None:
    tensor = Tensor("x", source)
    assert tensor.datatype == tensor.data.format == source.data.format
    assert tensor.data.tobytes() == source.tobytes()
    named: Any = Tensor("x", source, datatype=source.dtype.str)
    np.testing.assert_array_equal(np.frombuffer(named, dtype=named.datatype), source.reshape(-1))


def test_given_shape_and_datatype_change_no_data() -> None:
    source = np.arange(6, dtype=np.int32).reshape(2, 3)
    tensor = Tensor("x", source, [-1, 99], "FP32")
    assert (tensor.shape, tensor.datatype) == ((-1, 99), "FP32")
    assert (tensor.data.shape, tensor.data.format, tensor.size) == ((2, 3), "i", 24)
    assert Tensor("x", source, shape=range(3)).shape == (0, 1, 2)
    assert Tensor("x", source, shape=()).shape == ()


def test_a_tensor_of_a_tensor_takes_only_its_buffer() -> None:
    tensor = Tensor("x", Tensor._from_request("y", b"abc", (7,), "BYTES"))
    assert (tensor.name, tensor.shape, tensor.datatype, bytes(tensor)) == ("x", (3,), "UINT8", b"abc")
    again = Tensor("x", Tensor("y", np.ones((2, 2), np.float16), [4], "mine"))
    assert (again.shape, again.datatype, again.data.format) == ((2, 2), "FP16", "e")


@pytest.mark.parametrize(
    ("source", "datatype", "shape"),
    [
        (bytearray(b"ab"), "UINT8", (2,)),
        (memoryview(b"ab"), "UINT8", (2,)),
        (memoryview(b"abcd")[::2], "UINT8", (2,)),
        (memoryview(b"ab").cast("c"), "c", (2,)),
        (memoryview(b"12345678").cast("P"), "P", (1,)),
        (array.array("l", [1, 2]), "INT64", (2,)),
        (array.array("L", [1]), "UINT64", (1,)),
        (np.float32(1), "FP32", ()),
        (np.arange(3, dtype=">u4"), ">I", (3,)),
        (np.array([1j]), "Zd", (1,)),
        (np.array([1, 2]), "INT64", (2,)),
        (np.zeros(2, "u8"), "UINT64", (2,)),
        (np.zeros(2, "q"), "INT64", (2,)),
    ],
)
def test_any_buffer_is_a_source(source: Any, datatype: str, shape: tuple[int, ...]) -> None:
    tensor = Tensor("x", source)
    assert (tensor.datatype, tensor.shape, bytes(tensor)) == (datatype, shape, memoryview(source).tobytes())


@pytest.mark.parametrize(
    "source",
    [
        np.arange(12).reshape(3, 4).T,
        np.arange(12, dtype=np.float16)[::-2],
        np.broadcast_to(np.int8(3), (2, 2)),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.zeros((0, 2)),
        np.arange(3),
    ],
)
def test_elements_are_in_c_order(source: np.ndarray[Any, Any]) -> None:
    tensor = Tensor("x", source)
    assert bytes(tensor) == bytes(tensor._wire_bytes()) == source.tobytes()
    np.testing.assert_array_equal(np.asarray(tensor), source)


def test_a_tensor_is_a_read_only_view_of_its_source() -> None:
    source = np.zeros(3, np.int32)
    tensor, wire = Tensor("x", source), Tensor("x", source)._wire_bytes()
    source[0] = 7
    assert np.asarray(tensor).tolist() == [7, 0, 0]
    assert wire[0] == 7
    assert tensor.data.readonly
    assert not np.asarray(tensor).flags.writeable
    alive = weakref.ref(source)
    del source, wire
    gc.collect()
    assert alive() is not None
    given = b"abc"
    assert Tensor("x", given)._wire_bytes() is given


@pytest.mark.parametrize("source", [b"ab", memoryview(b"ab"), Tensor("x", b"ab")])
def test_immutable_sources_are_frozen_without_a_copy(source: Any) -> None:
    tensor = Tensor("x", source)
    assert tensor._frozen() is tensor
    request = Tensor._from_request("x", b"ab", (2,), "UINT8")
    assert request._frozen() is request


@pytest.mark.parametrize("source", [np.arange(6.0).reshape(2, 3).T, np.array(3), np.array(["a"]), bytearray(b"ab")])
def test_mutable_sources_are_frozen_as_a_copy(source: Any) -> None:
    tensor = Tensor("x", Tensor("y", source), [7], "mine")
    frozen, before = tensor._frozen(), bytes(tensor)
    assert frozen is not tensor
    assert (frozen.name, frozen.shape, frozen.datatype) == ("x", (7,), "mine")
    assert (frozen.data.format, frozen.data.shape) == (tensor.data.format, tensor.data.shape)
    if isinstance(source, bytearray):
        source[:] = b"cd"
    else:
        source[...] = np.zeros(source.shape, source.dtype)
    assert bytes(frozen) == before != bytes(tensor)


def test_readers_of_buffers_accept_a_tensor() -> None:
    tensor: Any = Tensor("x", np.arange(4, dtype=np.uint8))
    assert io.BytesIO(tensor).read() == b"".join([tensor]) == bytes(tensor) == bytes(memoryview(tensor))
    assert np.frombuffer(tensor, np.uint16).shape == (2,)
    assert int(np.mean(tensor)) == 1
    assert np.stack([tensor, tensor]).shape == (2, 4)
    assert (np.arange(4) + np.asarray(tensor)).tolist() == np.add(tensor, [0, 1, 2, 3]).tolist() == [0, 2, 4, 6]
    assert type(np.asarray(tensor)) is type(np.array(tensor)) is np.ndarray


@pytest.mark.parametrize(
    "use",
    [
        len,
        lambda tensor: tensor[0],
        list,
        lambda tensor: 1 in tensor,
        lambda tensor: tensor + 1,
        lambda tensor: 1 - tensor,
        operator.neg,
        float,
        lambda tensor: tensor < 1,
        pickle.dumps,
    ],
)
def test_operations_of_arrays_are_refused(use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError):
        use(Tensor("x", np.zeros(1)))


@pytest.mark.parametrize("name", ["name", "shape", "datatype", "data", "size", "ref_obj", "dtype", "strides", "mine"])
def test_attributes_are_read_only(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(Tensor("x", np.zeros(1)), name, None)


def test_attributes_of_arrays_are_missing_with_a_hint() -> None:
    tensor: Any = Tensor("x", np.zeros(1))
    assert not hasattr(tensor, "reshape")
    with pytest.raises(AttributeError, match=r"'Tensor' object has no attribute 'mean'; use np.asarray\(tensor\)"):
        tensor.mean()
    assert "mean" not in dir(tensor)
    assert {"name", "shape", "datatype", "data", "size"} <= set(dir(tensor))


def test_tensors_compare_by_identity() -> None:
    tensor, other = Tensor("x", np.zeros(2)), Tensor("x", np.zeros(2))
    assert tensor == tensor  # noqa: PLR0124 - the comparison is tested
    assert tensor != other
    assert bool(tensor)
    assert len({tensor, other, copy.copy(tensor), copy.deepcopy(tensor)}) == 2
    assert repr(tensor).startswith("<pyovms.Tensor object at ")
    assert f"{tensor}" == str(tensor) == repr(tensor)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("x",), "takes either data or buffer, got none"),
        ((b"x", "text"), "must have the buffer protocol.*got str; use text.encode"),
        (("x", [1]), "must have the buffer protocol.*got list"),
        (("x", None), "got NoneType"),
        (("x", 3), "got int"),
        ((3, b""), "name must be text, got int"),
        (("x", b"", "12"), "shape must be a sequence of 64-bit integers, got '12'"),
        (("x", b"", [2**63]), r"shape must be a sequence of 64-bit integers, got \[9223372036854775808\]"),
        (("x", b"", 3), "shape must be"),
        (("x", b"", [1.5]), "shape must be"),
        (("x", b"", None, 5), "datatype of 'x' must be text, got int"),
        (("x", np.array([None])), "holds Python objects"),
    ],
)
def test_wrong_arguments_are_named_in_the_error(arguments: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        Tensor(*arguments)


def test_errors_of_the_buffer_are_raised() -> None:
    with pytest.raises(ValueError, match="cannot include dtype 'M' in a buffer"):
        Tensor("x", np.array(["2020-01-01"], "M8[D]"))
    released = memoryview(b"abc")
    released.release()
    with pytest.raises(ValueError, match="released"):
        Tensor("x", released)


def test_data_can_be_given_as_buffer() -> None:
    assert bytes(Tensor("x", data=b"a")) == bytes(Tensor(name="x", buffer=b"a")) == b"a"
    with pytest.raises(TypeError, match="got both"):
        Tensor("x", b"a", buffer=b"a")
    name: Any = b"x"
    assert Tensor(name, b"").name == "x"


@given(st.sampled_from(sorted(ROWS.values())), st.lists(st.integers(0, 3), max_size=3), st.booleans())
def test_bytes_survive_two_nodes(code: str, dims: list[int], transposed: bool) -> None:
    source = np.arange(np.prod(dims, dtype=int)).astype(code).reshape(dims)
    tensor = Tensor("x", source.T if transposed else source)
    again = Tensor("y", np.asarray(tensor))
    assert (again.shape, again.datatype, bytes(again)) == (tensor.shape, tensor.datatype, bytes(tensor))


def test_the_exporter_of_newer_pythons_has_the_same_buffer() -> None:
    class Made(Exporter): ...

    source = np.arange(6, dtype=np.float16).reshape(2, 3)
    view = over_array(Made, source).__buffer__(0)
    assert (view.format, view.shape, view.readonly, view.tobytes()) == ("e", (2, 3), True, source.tobytes())
    source[0, 0] = 9
    assert view.tobytes() == source.tobytes()
    made = over_buffer(Made, (2,), "q", bytearray(16))
    view = made.__buffer__(0)
    assert (view.format, view.shape, view.readonly) == ("q", (2,), True)
    assert copy.deepcopy(copy.copy(made)) is made
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(made)


# The context of a call


def test_there_is_no_context_outside_nodes() -> None:
    with pytest.raises(RuntimeError, match="works in execute, open and close of a Python node"):
        current_context()


def test_parameters_can_only_be_read() -> None:
    given = {"a": 1}
    parameters: Any = Context(given, "").parameters
    given["b"] = 2
    assert dict(parameters) == {"a": 1}
    with pytest.raises(TypeError):
        parameters["a"] = 2


def test_storage_is_read_by_items_and_attributes() -> None:
    storage = Storage()
    storage.seen = 1
    storage["more"] = 2
    assert (storage["seen"], storage.more, dict(storage)) == (1, 2, {"seen": 1, "more": 2})
    del storage.seen
    with pytest.raises(AttributeError, match="storage has no 'seen'; stored names: more"):
        _ = storage.seen
    with pytest.raises(AttributeError, match="'seen'"):
        del storage.seen


def test_a_deadline_is_a_time_and_remaining_seconds() -> None:
    none, soon, past = Context({}, ""), Context({}, "", 60), Context({}, "", -1)
    assert (none.deadline, none.remaining()) == (None, None)
    assert soon.deadline == pytest.approx(time.time() + 60, abs=1)
    assert soon.remaining() == pytest.approx(60, abs=1)
    assert past.remaining() == 0
