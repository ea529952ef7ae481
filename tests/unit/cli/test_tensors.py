from __future__ import annotations

import contextlib
import io
import json
import struct
import sys
import wave
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ovmstrio.cli.sequence_inputs import SliceOptions, Steps, WrongOption, plan
from ovmstrio.cli.tensor_conversion import to_type
from ovmstrio.cli.tensor_files import read_inputs
from ovmstrio.cli.tensor_images import ImageOptions
from ovmstrio.cli.tensor_output import as_json, write_outputs
from ovmstrio.cli.tensor_sounds import decode_wave
from ovmstrio.client import TensorInfo
from ovmstrio.core.errors import InvalidRequest

X = TensorInfo("x", "FP32", (1, 3))
Y = TensorInfo("y", "INT64", (-1,))
IMAGE_FIRST = TensorInfo("image", "UINT8", (1, 3, 4, 5))
IMAGE_LAST = TensorInfo("image", "FP32", (1, 4, 5, 3))
TEXT = TensorInfo("text", "BYTES", (-1,))
UNTYPED = TensorInfo("untyped", "INVALID", ())
SOUND = TensorInfo("sound", "FP32", (-1, -1))
INT16_SOUND = TensorInfo("sound", "INT16", (-1, -1))

pytestmark = pytest.mark.usefixtures("command_folder")


def _ignore(_: str) -> None:
    pass


def _write(files: dict[str, bytes]) -> None:
    for name, content in files.items():
        Path(name).write_bytes(content)


def _npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _recording(width: int, frames: bytes, channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as writer:
        writer.setparams((channels, width, 16_000, 0, "NONE", ""))
        writer.writeframes(frames)
    return buffer.getvalue()


NUMBERS = _npy(np.arange(3, dtype=np.float32))
PACKED = np.array([1, 2], "<i8").tobytes()
HALF = _recording(2, np.array([16_384], "<i2").tobytes())
BODY = b'{"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}'


@pytest.mark.parametrize(
    ("tensors", "files", "expected"),
    [
        pytest.param([X], {"x.npy": NUMBERS}, {"x": [[0, 1, 2]]}, id="only input"),
        pytest.param([X, Y], {"x=x.npy": NUMBERS, "y=y.json": b"[4]"}, {"x": [[0, 1, 2]], "y": [4]}, id="named inputs"),
        pytest.param([X, Y], {"a.npz": _npz(x=np.ones((1, 3)), y=[7])}, {"x": [[1, 1, 1]], "y": [7]}, id="archive"),
        pytest.param([X, Y], {"o.json": b'{"x": [[1, 1, 1]], "y": [7]}'}, {"x": [[1, 1, 1]], "y": [7]}, id="object"),
        pytest.param([X], {"b.json": BODY}, {"x": [[1, 2, 3]]}, id="request body of KServe"),
        pytest.param([X], {"x=a.npz": _npz(a=[0], x=np.ones((1, 3)))}, {"x": [[1, 1, 1]]}, id="one of an archive"),
        pytest.param([Y], {"any.bin": PACKED}, {"y": [1, 2]}, id="packed elements"),
        pytest.param([TEXT], {"any.bin": PACKED}, {"text": [PACKED]}, id="bytes"),
        pytest.param([TensorInfo("b", "BF16", (2,))], {"b": b"\x80\x3f\0\xc0"}, {"b": [1.0, -2.0]}, id="bits of BF16"),
        pytest.param([UNTYPED], {"x.json": b"[1, 2]"}, {"untyped": [1, 2]}, id="no type"),
        pytest.param([SOUND], {"a.WAV": HALF}, {"sound": [[0.5]]}, id="recording"),
    ],
)
def test_inputs_are_read_from_files(tensors: list[TensorInfo], files: dict[str, bytes], expected: Any) -> None:
    _write({name.rpartition("=")[2]: content for name, content in files.items()})
    inputs = read_inputs(list(files), tensors, _ignore)
    assert {name: array.tolist() for name, array in inputs.items()} == expected
    if "x" in inputs:
        assert inputs["x"].dtype == np.float32


@pytest.mark.parametrize(("tensor", "content"), [(X, NUMBERS), (X, b"[0, 1, 2]"), (SOUND, HALF)])
def test_the_format_of_standard_input_is_detected(
    monkeypatch: pytest.MonkeyPatch, tensor: TensorInfo, content: bytes
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    (array,) = read_inputs(["-"], [tensor], notes.append).values()
    assert array.tolist() == ([[0.5]] if tensor is SOUND else [[0, 1, 2]])
    assert "batch axis" in notes[0]


def test_an_input_without_a_type_is_sent_as_bytes_or_text() -> None:
    _write({"x.bin": b"\0\1"})
    assert read_inputs(["x.bin"], [UNTYPED], _ignore)["untyped"] == b"\0\1"
    notes: list[str] = []
    assert read_inputs(["untyped=two words"], [UNTYPED], notes.append)["untyped"] == b"two words"
    assert notes == ["input untyped: no such file; sent as text"]
    assert read_inputs(["What is 2 + 2 = ?"], [UNTYPED], _ignore)["untyped"] == b"What is 2 + 2 = ?"
    with pytest.raises(InvalidRequest, match='unknown input "untypd"; the model takes untyped'):
        read_inputs(["untypd=two words"], [UNTYPED], _ignore)


@pytest.mark.parametrize(("tensor", "where"), [(IMAGE_FIRST, (0, 0, 1, 2)), (IMAGE_LAST, (0, 1, 2, 0))])
def test_an_image_takes_the_layout_and_size_of_the_input(tensor: TensorInfo, where: Any) -> None:
    _write({"i.png": _png(Image.new("RGB", (50, 40), (200, 10, 30)))})
    image = read_inputs(["i.png"], [tensor], _ignore)["image"]
    assert (image.shape, image[where]) == (tensor.shape, 200)


def test_pixels_are_scaled_or_left_to_the_server() -> None:
    _write({"i.png": _png(Image.new("RGB", (8, 8), (200, 100, 50)))})
    options = ImageOptions(mean=100, scale=50)
    assert read_inputs(["i.png"], [IMAGE_LAST], _ignore, options)["image"][0, 0, 0].tolist() == [2, 0, -1]
    with pytest.raises(InvalidRequest, match="would change"):
        read_inputs(["i.png"], [IMAGE_FIRST], _ignore, options)
    encoded = read_inputs(["i.png"], [IMAGE_LAST], _ignore, ImageOptions(encoded=True))["image"]
    assert encoded.tolist() == [Path("i.png").read_bytes()]


@pytest.mark.parametrize(
    ("options", "files"),
    [
        (ImageOptions(mean=1), ["x.npy", "y=a.json"]),
        (ImageOptions(scale=0), ["i.png"]),
        (ImageOptions(scale=float("nan")), ["i.png"]),
        (ImageOptions(mean=float("inf")), ["i.png"]),
        (ImageOptions(encoded=True, scale=2), ["i.png"]),
    ],
)
def test_image_options_without_effect_are_refused(options: ImageOptions, files: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="--mean and --scale"):
        options.check(files)
    ImageOptions(mean=0, scale=255).check(["x=a.npy", "image=i.JPG"])
    ImageOptions(encoded=True).check(["x.bin"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.json", "x=x.json"], "duplicate inputs: x"),
        (["x=-", "text=-"], "text=-: standard input was read for x=-"),
        (["x=both.json"], 'expected "x", got a, b'),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    _write({"x.json": b"[[1, 2, 3]]", "both.json": b'{"a": [1], "b": [2]}'})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[0, 1, 2]")))
    with pytest.raises(InvalidRequest, match=message):
        read_inputs(arguments, [X, TEXT] if "text=-" in arguments else [X], _ignore)


NO_DIMENSION = NUMBERS.replace(b"(3,), }", b"(3,),  ")
HUGE_DIMENSION = NUMBERS.replace(b"(3,), }" + b" " * 9, b"(" + b"9" * 12 + b",)}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.npy", b"nonsense", "not a file of numpy arrays"),
        ("x.npy", NO_DIMENSION, "not a file of numpy arrays"),
        ("x.npy", HUGE_DIMENSION, "not a file of numpy arrays"),
        ("x.json", b"{", "not JSON"),
        ("x.json", b"[" * 200_000, "not JSON"),
        ("x.json", b'{"z": [1]}', "unknown: z; missing: x"),
        ("x.json", b"[1, 2]", "expected FP32 [1, 3], got [1, 2]"),
        ("x.json", b'["a", "b", "c"]', "expected FP32"),
        ("x.png", b"no image", "does not look like an image"),
        ("x.bin", b"12345", "not a multiple of FP32"),
        (
            "x.bin",
            b"1234",
            "expected the bytes of FP32 [1, 3], got 1 elements; files other than arrays, images and JSON are",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_a_reason(name: str, content: bytes, message: str) -> None:
    _write({name: content})
    with pytest.raises(InvalidRequest) as raised:
        read_inputs([name], [X], _ignore)
    assert message in str(raised.value)


def test_all_unfit_inputs_are_reported() -> None:
    _write({"both.json": b'{"x": [1], "y": [1.5]}'})
    with pytest.raises(InvalidRequest) as raised:
        read_inputs(["both.json"], [X, Y], _ignore)
    assert [line.split(":")[0] for line in str(raised.value).split("\n")] == ['input "x"', 'input "y"']


def test_a_damaged_file_is_read_or_refused() -> None:
    archive = _npz(image=np.arange(60.0).reshape(1, 4, 5, 3))
    image = _png(Image.fromarray(np.arange(60, dtype=np.uint8).reshape(4, 5, 3)))
    for name, content in (("a.npz", archive), ("a.png", image)):
        for position in range(len(content)):
            damaged = bytearray(content)
            damaged[position] ^= 0xFF
            _write({name: bytes(damaged)})
            with contextlib.suppress(InvalidRequest):
                read_inputs([name], [IMAGE_LAST], _ignore)


def test_an_image_too_large_to_decode_is_refused() -> None:
    image = _png(Image.new("1", (1, 1)))
    header = b"IHDR" + struct.pack(">II", 20_000, 20_000) + image[24:29]
    _write({"bomb.png": image[:12] + header + struct.pack(">I", zlib.crc32(header)) + image[33:]})
    with pytest.raises(InvalidRequest, match="exceeds limit"):
        read_inputs(["bomb.png"], [IMAGE_LAST], _ignore)


@given(st.binary(max_size=200), st.sampled_from([".npy", ".npz", ".json", ".png", ".bin"]))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str) -> None:
    file = tmp_path_factory.getbasetemp() / f"any{suffix}"
    file.write_bytes(content)
    try:
        inputs = read_inputs([str(file)], [IMAGE_LAST], _ignore)
    except InvalidRequest:
        return
    assert inputs["image"].shape == IMAGE_LAST.shape


INTEGERS = ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"]


def _convert(value: Any, datatype: str) -> Any:
    return to_type(value, TensorInfo("x", datatype, (-1,)), lambda _: None)


@given(st.data(), st.sampled_from([*INTEGERS, "BOOL"]), st.sampled_from([*INTEGERS, "FP16", "FP32", "FP64", "BOOL"]))
def test_integers_are_exact_or_refused(data: st.DataObject, source: str, target: str) -> None:
    kind = "bool" if source == "BOOL" else source.lower()
    bounds = (0, 1) if source == "BOOL" else (int(np.iinfo(kind).min), int(np.iinfo(kind).max))
    value = data.draw(st.integers(*bounds))
    try:
        converted = _convert(np.array([value], kind), target)
    except InvalidRequest:
        return
    assert converted[0].item() == value


@given(st.lists(st.integers(-(2**70), 2**70), max_size=5), st.sampled_from(INTEGERS))
def test_integers_of_json_are_exact_or_refused(values: list[int], target: str) -> None:
    bounds = np.iinfo(target.lower())
    fits = all(int(bounds.min) <= value <= int(bounds.max) for value in values)
    try:
        converted = _convert(values, target)
    except InvalidRequest:
        assert not fits
        return
    assert converted.tolist() == values


@pytest.mark.parametrize(
    ("value", "datatype", "text"),
    [
        (np.array([-1], np.int8), "UINT8", "int8, whose values would change"),
        (np.array([255], np.uint8), "INT8", "would change"),
        (np.array([2**24 + 1]), "FP32", "would change"),
        (np.array([1e300]), "FP32", "would change"),
        (np.array([257]), "BF16", "would change"),
        ([257], "BF16", "would change"),
        (np.array([3.4e38]), "BF16", "would change"),
        (np.array([1j]), "FP32", "got complex128"),
        (np.array([1, 2]), "BYTES", "values of type int"),
        ([1.5], "INT32", "would change"),
        (np.array([1.5], object), "INT32", "would change"),
        (["no"], "BOOL", "values of type str"),
        ([None], "FP32", "values of type NoneType"),
        ([[1], [2, 3]], "FP32", "differing lengths"),
        ([1.5, 10**400], "FP64", "too large"),
        ([10**30], "INT64", "fits no integer type"),
        ([["a"], ["b", "c"]], "BYTES", "values of type list"),
        (["\ud800"], "BYTES", "no UTF-8"),
    ],
)
def test_values_that_would_change_are_refused(value: Any, datatype: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=f'input "x": expected {datatype}') as raised:
        _convert(value, datatype)
    assert text in str(raised.value)


def test_floats_are_rounded_and_texts_stand_for_nan_and_infinity() -> None:
    for value in (np.array([0.1]), [0.1], np.array([256]), np.array([0.1, 200.3], np.float16)):
        assert _convert(value, "BF16").dtype == np.float32
    converted = _convert([1, "NaN", "-Infinity"], "FP16")
    np.testing.assert_array_equal(converted, np.array([1, np.nan, -np.inf], np.float16))


def test_too_deep_lists_are_refused() -> None:
    value: Any = 1
    for _ in range(65):
        value = [value]
    with pytest.raises(InvalidRequest):
        _convert(value, "FP32")


@pytest.mark.parametrize(
    ("width", "frames"),
    [
        (1, bytes([0, 64, 128, 192, 255])),
        (2, np.array([-32_768, -16_384, 0, 16_384, 32_767], "<i2").tobytes()),
        (3, b"".join(value.to_bytes(3, "little", signed=True) for value in (-(2**23), -(2**22), 0, 2**22, 2**23 - 1))),
        (4, np.array([-(2**31), -(2**30), 0, 2**30, 2**31 - 1], "<i4").tobytes()),
    ],
)
def test_samples_of_every_width_are_between_minus_one_and_one(width: int, frames: bytes) -> None:
    samples = decode_wave(_recording(width, frames), "a.wav", SOUND)
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, [-1, -0.5, 0, 0.5, 1 - 2.0 ** (1 - 8 * width)], atol=1e-7)


def test_channels_are_rows_and_integers_are_unscaled() -> None:
    frames = np.array([1, -1, 2, -2, 3, -3], "<i2").tobytes()
    samples = decode_wave(_recording(2, frames, channels=2), "a.wav", SOUND)
    assert (samples * 32_768).tolist() == [[1, 2, 3], [-1, -2, -3]]
    samples = decode_wave(_recording(2, np.array([5, -7], "<i2").tobytes()), "a.wav", INT16_SOUND)
    assert (samples.dtype, samples.tolist()) == (np.int16, [5, -7])


@pytest.mark.parametrize("content", [b"", b"RIFF", b"RIFF\0\0\0\0WAVE", _recording(2, b"ab")[:30], b"no sound at all"])
def test_damaged_recordings_are_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"a\.wav: expected a WAV file of PCM samples"):
        decode_wave(content, "a.wav", SOUND)


def test_a_truncated_recording_has_its_complete_samples() -> None:
    content = _recording(2, np.array([1, 2, 3], "<i2").tobytes())
    assert (decode_wave(content[:-1], "a.wav", SOUND) * 32_768).tolist() == [1, 2]


def test_outputs_are_written_without_loss_or_refused(tmp_path: Path) -> None:
    plain = as_json({"y": np.array([[1.5, np.nan], [np.inf, -np.inf]], np.float32)})
    assert json.loads(json.dumps(plain, allow_nan=False)) == {"y": [[1.5, "NaN"], ["Infinity", "-Infinity"]]}
    saved = tmp_path / "y.npy"
    write_outputs({"y": np.array([b"a\0b", b""], object)}, str(saved))
    assert np.load(saved).tolist() == [b"a\0b", b""]
    with pytest.raises(InvalidRequest, match="end in zeros"):
        write_outputs({"y": np.array([b"a\0"], object)}, str(tmp_path / "z.npy"))
    # These are parameters of numpy.savez.
    several = {"file": np.arange(2), "allow_pickle": np.arange(3)}
    write_outputs(several, str(tmp_path / "several.npz"))
    saved_arrays = {name: array.tolist() for name, array in np.load(tmp_path / "several.npz").items()}
    assert saved_arrays == {"file": [0, 1], "allow_pickle": [0, 1, 2]}


AUDIO = TensorInfo("audio", "FP32", (1, 4))
OPEN = TensorInfo("audio", "FP32", (1, -1))
RATE = TensorInfo("rate", "INT64", ())
ROW = TensorInfo("row", "FP32", (1, 3))


def _plan(
    arrays: dict[str, Any], expected: list[TensorInfo], cutting: SliceOptions, notes: list[str] | None = None
) -> Steps:
    with TemporaryDirectory() as folder:
        for name, array in arrays.items():
            np.save(Path(folder) / name, array)
        given_ = [f"{name}={folder}/{name}.npy" for name in arrays]
        return plan(given_, expected, cutting, ([] if notes is None else notes).append)


def _numbers(size: int) -> np.ndarray[Any, Any]:
    return np.arange(1, size + 1, dtype=np.float32)


def test_an_input_is_split_by_the_size_of_the_axis_and_padded() -> None:
    notes: list[str] = []
    steps = _plan({"audio": _numbers(10)}, [AUDIO], SliceOptions(axis=1), notes)
    assert [each["audio"].tolist() for each in steps] == [[[1, 2, 3, 4]], [[5, 6, 7, 8]], [[9, 10, 0, 0]]]
    assert len(steps) == 3
    assert notes[1:] == [
        "input audio: 10 along axis 1, in 3 steps of 4",
        "the last part has 2 of 4 elements: padded with zeros",
    ]
    words = TensorInfo("words", "BYTES", (2,))
    steps = _plan({"words": np.array([b"a", b"b", b"c"])}, [words], SliceOptions())
    assert [each["words"].tolist() for each in steps] == [[b"a", b"b"], [b"c", b""]]


@pytest.mark.parametrize(
    ("tensor", "pad", "last", "note"),
    [
        (AUDIO, False, [[5, 6, 7, 8]], "dropped"),
        (OPEN, None, [[9, 10]], "sent as it is"),
        (OPEN, True, [[9, 10, 0, 0]], "padded with zeros"),
        (OPEN, False, [[5, 6, 7, 8]], "dropped"),
    ],
)
def test_a_short_last_step_is_padded_dropped_or_sent(
    tensor: TensorInfo, pad: bool | None, last: Any, note: str
) -> None:
    notes: list[str] = []
    steps = _plan({"audio": _numbers(10)}, [tensor], SliceOptions(4, axis=-1, pad=pad), notes)
    assert [each["audio"].tolist() for each in steps][-1] == last
    assert notes[-1] == f"the last part has 2 of 4 elements: {note}"


def test_the_longest_inputs_are_split_unless_the_option_names_them() -> None:
    expected = [TensorInfo("a", "FP32", (1, 2)), TensorInfo("b", "FP32", (-1, 2)), ROW, RATE]
    arrays = {
        "rate": np.array(16_000),
        "row": _numbers(3),
        "a": _numbers(8).reshape(4, 2),
        "b": -_numbers(8).reshape(4, 2),
    }
    notes: list[str] = []
    steps = list(_plan(arrays, expected, SliceOptions(), notes))
    assert len(steps) == 4
    assert {name: array.tolist() for name, array in steps[1].items()} == {
        "a": [[3, 4]],
        "b": [[-3, -4]],
        "row": [[1, 2, 3]],
        "rate": 16_000,
    }
    assert "input row: all of [1, 3] at each step" in notes
    expected = [TensorInfo("a", "FP32", (1, 2)), TensorInfo("table", "FP32", (-1, 2))]
    arrays = {name: np.ones((3, 2), np.float32) for name in ("a", "table")}
    assert [each["table"].shape for each in _plan(arrays, expected, SliceOptions())] == [(1, 2)] * 3
    kept = _plan(arrays, expected, SliceOptions(unsliced=frozenset({"table"})))
    assert [each["table"].shape for each in kept] == [(3, 2)] * 3


@pytest.mark.parametrize(
    ("tensor", "size", "cutting", "text"),
    [
        (AUDIO, 8, SliceOptions(axis=2), r"--axis 2 is out of range: the model takes audio \[1, 4\]"),
        (AUDIO, 8, SliceOptions(axis=-3), "--axis -3 is out of range"),
        (AUDIO, 8, SliceOptions(3, axis=1), 'input "audio": expected 4 along axis 1, got 3'),
        (OPEN, 8, SliceOptions(axis=1), "the length along axis 1 is dynamic; set it with --chunk"),
        (AUDIO, 3, SliceOptions(axis=1, pad=False), "the length of 3 along the axis is shorter than a part of 4"),
        (OPEN, 0, SliceOptions(2, axis=1), "the length of 0 along the axis is shorter than a part of 2"),
        (
            AUDIO,
            8,
            SliceOptions(unsliced=frozenset({"aduio"})),
            "--unsliced aduio: unknown input; the model takes audio",
        ),
        (AUDIO, 8, SliceOptions(unsliced=frozenset({"audio"})), "no input can be cut"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(
    tensor: TensorInfo, size: int, cutting: SliceOptions, text: str
) -> None:
    with pytest.raises(WrongOption, match=text):
        _plan({"audio": np.zeros((1, size), np.float32)}, [tensor], cutting)


def test_arrays_that_do_not_fit_the_inputs_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r'"audio": expected FP32 \[1, -1\], got \[2, 8\]'):
        _plan({"audio": np.zeros((2, 8), np.float32)}, [AUDIO], SliceOptions(axis=1))
    with pytest.raises(InvalidRequest, match='"row": expected FP32, got complex64'):
        _plan({"row": np.zeros((2, 3), np.complex64)}, [ROW], SliceOptions())
    arrays = {"audio": np.zeros((1, 8), np.float32), "row": np.zeros((1, 2), np.float32)}
    with pytest.raises(InvalidRequest, match=r'"row" is not the longest .* expected FP32 \[1, 3\], got \[1, 2\]'):
        _plan(arrays, [AUDIO, ROW], SliceOptions(axis=1))


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    axis=st.integers(-3, 2),
    size=st.integers(1, 7),
    pad=st.sampled_from([None, True, False]),
)
def test_joined_steps_are_the_array_padded_or_truncated(
    shape: list[int], axis: int, size: int, pad: bool | None
) -> None:
    if not -len(shape) <= axis < len(shape) or (pad is False and shape[axis] < size):
        return
    array = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    tensor = TensorInfo("x", "FP32", (-1,) * len(shape))
    steps = _plan({"x": array}, [tensor], SliceOptions(size, axis, pad))
    parts = [each["x"] for each in steps]
    joined = np.moveaxis(np.concatenate(parts, axis), axis, 0)
    moved = np.moveaxis(array, axis, 0)
    same = min(len(joined), len(moved))
    np.testing.assert_array_equal(joined[:same], moved[:same])
    assert not joined[same:].any()
    assert len(parts) == len(steps)
    assert len(joined) == {None: len(moved), True: -(-len(moved) // size) * size, False: len(moved) // size * size}[pad]
