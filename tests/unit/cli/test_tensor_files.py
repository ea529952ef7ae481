"""Files as the inputs of a model."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ovms_cli.tensor_files import read_inputs
from ovms_cli.tensor_images import ImageOptions
from ovmstrio.client import TensorInfo
from ovmstrio.core.errors import InvalidRequest

X = TensorInfo("x", "FP32", (1, 3))
Y = TensorInfo("y", "INT64", (-1,))
IMAGE_FIRST = TensorInfo("image", "UINT8", (1, 3, 4, 5))
IMAGE_LAST = TensorInfo("image", "FP32", (1, 4, 5, 3))
TEXT = TensorInfo("text", "BYTES", (-1,))


def _ignore(_: str) -> None:
    """Take no note."""


def _write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def _npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_the_only_input_needs_no_name(tmp_path: Path) -> None:
    """A .npy file is the input, and a missing batch axis is added and said."""
    notes: list[str] = []
    file = _write(tmp_path / "x.npy", _npy(np.arange(3, dtype=np.float32)))
    inputs = read_inputs([file], [X], notes.append)
    assert inputs["x"].tolist() == [[0, 1, 2]]
    assert "batch axis" in notes[0]


def test_several_inputs_are_named(tmp_path: Path) -> None:
    """Each file says whose it is, whatever its kind."""
    x = _write(tmp_path / "x.npy", _npy(np.ones((1, 3))))
    y = _write(tmp_path / "y.json", b"[4, 5]")
    inputs = read_inputs([f"x={x}", f"y={y}"], [X, Y], _ignore)
    assert inputs["x"].dtype == np.float32
    assert inputs["y"].tolist() == [4, 5]


def test_an_archive_and_an_object_hold_inputs_by_name(tmp_path: Path) -> None:
    """.npz and JSON carry several inputs in one file."""
    archive = tmp_path / "both.npz"
    np.savez(archive, x=np.zeros((1, 3)), y=np.array([7]))
    document = _write(tmp_path / "both.json", json.dumps({"x": [[0, 0, 0]], "y": [7]}).encode())
    for file in (str(archive), document):
        inputs = read_inputs([file], [X, Y], _ignore)
        assert (inputs["x"].tolist(), inputs["y"].tolist()) == ([[0, 0, 0]], [7])


def test_a_body_of_the_protocol_is_understood(tmp_path: Path) -> None:
    """What curl sends can be sent by the command as well."""
    body = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}
    inputs = read_inputs([_write(tmp_path / "b.json", json.dumps(body).encode())], [X], _ignore)
    assert inputs["x"].tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(("tensor", "where"), [(IMAGE_FIRST, (0, 0, 1, 2)), (IMAGE_LAST, (0, 1, 2, 0))])
def test_an_image_takes_the_layout_and_size_of_the_input(tmp_path: Path, tensor: TensorInfo, where: Any) -> None:
    """Channels stand where the input has them, as red, green, blue."""
    buffer = io.BytesIO()
    Image.new("RGB", (50, 40), (200, 10, 30)).save(buffer, "PNG")
    image = read_inputs([_write(tmp_path / "i.png", buffer.getvalue())], [tensor], _ignore)["image"]
    assert image.shape == tensor.shape
    assert image[where] == 200


def test_pixels_are_scaled_before_they_are_sent(tmp_path: Path) -> None:
    """Models that were trained on small numbers get them; types that cannot hold them refuse."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 100, 50)).save(buffer, "PNG")
    file, options = _write(tmp_path / "i.png", buffer.getvalue()), ImageOptions(mean=100, scale=50)
    assert read_inputs([file], [IMAGE_LAST], _ignore, options)["image"][0, 0, 0].tolist() == [2, 0, -1]
    with pytest.raises(InvalidRequest, match="do not survive"):
        read_inputs([file], [IMAGE_FIRST], _ignore, options)


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
def test_options_that_would_have_no_effect_or_no_sense_are_refused(options: ImageOptions, files: list[str]) -> None:
    """Nobody believes that pixels were scaled when they were not."""
    with pytest.raises(InvalidRequest, match="--mean and --scale"):
        options.check(files)


def test_options_of_images_suit_images() -> None:
    """A named file is one as well, whatever the case of its ending."""
    ImageOptions(mean=0, scale=255).check(["x=a.npy", "image=i.JPG"])
    ImageOptions(encoded=True).check(["x.bin"])


def test_other_files_are_raw_bytes(tmp_path: Path) -> None:
    """One element of a BYTES input, or packed elements of any other."""
    file = _write(tmp_path / "any.bin", np.array([1, 2], "<i8").tobytes())
    assert read_inputs([file], [Y], _ignore)["y"].tolist() == [1, 2]
    assert read_inputs([file], [TEXT], _ignore)["text"].tolist() == [np.array([1, 2], "<i8").tobytes()]


def test_standard_input_is_recognised_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes mean the same with and without a file name."""
    for content in (_npy(np.arange(3.0)), b"[0, 1, 2]"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert read_inputs(["-"], [X], _ignore)["x"].tolist() == [[0, 1, 2]]


def test_standard_input_is_read_but_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second input does not silently get nothing."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[0, 1, 2]")))
    with pytest.raises(InvalidRequest, match="y=-: standard input was read for x=-"):
        read_inputs(["x=-", "y=-"], [X, TensorInfo("y", "BYTES", (-1,))], _ignore)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("x.npy", b"nonsense", "not a file of numpy arrays"),
        ("x.json", b"{", "not JSON"),
        ("x.json", b'{"z": [1]}', "unknown: z; missing: x"),
        ("x.bin", b"12345", "no whole number of FP32"),
        (
            "x.bin",
            b"1234",
            "expected the bytes of FP32 [1, 3], got 1 elements; what is no array, image or JSON is taken for packed",
        ),
        ("x.json", b"[1, 2]", "expected FP32 [1, 3], got [1, 2]"),
        ("x.json", b'["a", "b", "c"]', "expected FP32"),
        ("x.png", b"no image", "does not look like an image"),
        ("x.json", b"[" * 200_000, "not JSON"),
        ("x.npy", _npy(np.zeros(3)).replace(b"(3,), }", b"(3,),  "), "not a file of numpy arrays"),
        ("x.npy", _npy(np.zeros(3)).replace(b"(3,), }" + b" " * 9, b"(" + b"9" * 12 + b",)}"), "not a file of numpy"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    """The message names the file or the input, what was expected and what came."""
    with pytest.raises(InvalidRequest) as raised:
        read_inputs([_write(tmp_path / name, content)], [X], _ignore)
    assert text in str(raised.value)


def test_damage_anywhere_in_a_file_is_said(tmp_path: Path) -> None:
    """No changed byte of an archive or an image makes the reading fail otherwise."""
    archive, image = io.BytesIO(), io.BytesIO()
    np.savez_compressed(archive, image=np.arange(60.0).reshape(1, 4, 5, 3))
    Image.fromarray(np.arange(60, dtype=np.uint8).reshape(4, 5, 3)).save(image, "PNG")
    for name, content in (("a.npz", archive.getvalue()), ("a.png", image.getvalue())):
        for position in range(len(content)):
            damaged = bytearray(content)
            damaged[position] ^= 0xFF
            with contextlib.suppress(InvalidRequest):
                read_inputs([_write(tmp_path / name, bytes(damaged))], [IMAGE_LAST], _ignore)


def test_an_image_too_large_to_decode_is_refused(tmp_path: Path) -> None:
    """A small file does not fill the memory."""
    buffer = io.BytesIO()
    Image.new("1", (1, 1)).save(buffer, "PNG")
    header = b"IHDR" + struct.pack(">II", 20_000, 20_000) + buffer.getvalue()[24:29]
    content = buffer.getvalue()[:12] + header + struct.pack(">I", zlib.crc32(header)) + buffer.getvalue()[33:]
    with pytest.raises(InvalidRequest, match="exceeds limit"):
        read_inputs([_write(tmp_path / "bomb.png", content)], [IMAGE_LAST], _ignore)


def test_raw_bytes_of_bf16_are_its_bits(tmp_path: Path) -> None:
    """They are not integers that look like them."""
    file = _write(tmp_path / "b.bin", np.array([0x3F80, 0xC000], "<u2").tobytes())
    inputs = read_inputs([file], [TensorInfo("b", "BF16", (2,))], _ignore)
    assert inputs["b"].tolist() == [1.0, -2.0]


def test_an_input_given_twice_is_refused(tmp_path: Path) -> None:
    """The first does not vanish without a word."""
    file = _write(tmp_path / "x.json", b"[[1, 2, 3]]")
    with pytest.raises(InvalidRequest, match="given twice: x"):
        read_inputs([file, f"x={file}"], [X], _ignore)


def test_a_name_takes_its_value_out_of_a_file_of_several(tmp_path: Path) -> None:
    """The name that was given decides, and a file without it is refused."""
    archive = tmp_path / "several.npz"
    np.savez(archive, a=np.zeros((1, 3)), x=np.ones((1, 3)))
    assert read_inputs([f"x={archive}"], [X], _ignore)["x"].tolist() == [[1, 1, 1]]
    document = _write(tmp_path / "several.json", b'{"a": [1], "b": [2]}')
    with pytest.raises(InvalidRequest, match='has no "x", but a, b'):
        read_inputs([f"x={document}"], [X], _ignore)


def test_all_inputs_that_do_not_fit_are_told_at_once(tmp_path: Path) -> None:
    """One round is enough to mend them."""
    file = _write(tmp_path / "both.json", b'{"x": [1], "y": [1.5]}')
    with pytest.raises(InvalidRequest) as raised:
        read_inputs([file], [X, Y], _ignore)
    assert [line.split(":")[0] for line in str(raised.value).split("\n")] == ['input "x"', 'input "y"']


def test_an_encoded_image_goes_as_it_is(tmp_path: Path) -> None:
    """The server decodes it, whatever element type the input has."""
    file = _write(tmp_path / "i.png", b"any content")
    assert read_inputs([file], [IMAGE_LAST], _ignore, ImageOptions(encoded=True))["image"].tolist() == [b"any content"]


def test_an_input_of_a_type_without_a_name_takes_that_of_its_values(tmp_path: Path) -> None:
    """Metadata calls such types INVALID; bytes go as they are, and so does a text that is no file."""
    odd = [TensorInfo("odd", "INVALID", ())]
    numbers = read_inputs([_write(tmp_path / "x.json", b"[1, 2]")], odd, _ignore)["odd"]
    assert (numbers.dtype, numbers.tolist()) == (np.int64, [1, 2])
    assert read_inputs([_write(tmp_path / "x.bin", b"\x00\x01")], odd, _ignore)["odd"] == b"\x00\x01"
    notes: list[str] = []
    assert read_inputs(["odd=two words"], odd, notes.append)["odd"] == b"two words"
    assert notes == ["input odd: no file is called so; sent as text"]


@given(st.binary(max_size=200), st.sampled_from([".npy", ".npz", ".json", ".png", ".bin"]))
def test_no_file_makes_the_command_fail_otherwise(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str
) -> None:
    """Any bytes of any kind are read or refused."""
    file = tmp_path_factory.getbasetemp() / f"any{suffix}"
    file.write_bytes(content)
    try:
        inputs = read_inputs([str(file)], [IMAGE_LAST], _ignore)
    except InvalidRequest:
        return
    assert inputs["image"].shape == IMAGE_LAST.shape
